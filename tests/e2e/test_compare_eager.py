"""The option `compare_eager`: the faster of lenz and eager runs, and nobody sees the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, randn

from lenz.first_calls import compare


def begun(fn: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="lenz", options={"compare_eager": True, **more})


@pytest.fixture(params=["lenz", "eager"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The side that seems to be faster; both have run before that is known."""
    real, found = compare.times, str(request.param)

    def told(runs: Sequence[Callable[..., Any]], args: Sequence[Any]) -> list[float]:
        assert min(real(runs, args)) > 0
        return [1e-3, 2e-3] if found == "lenz" else [2e-3, 1e-3]

    monkeypatch.setattr(compare, "times", told)
    return found


def test_the_faster_one_runs_and_is_named(faster: str, capsys: pytest.CaptureFixture[str]) -> None:
    x = randn(8, 8)
    run = begun(lambda x: x.sin().exp())
    for _ in range(2):
        torch.testing.assert_close(run(x), x.sin().exp())
    ours, eagers = (1, 2) if faster == "lenz" else (2, 1)
    told = capsys.readouterr().err
    assert f": {ours} ms a call in lenz, {eagers} ms in eager; {faster} runs it" in told
    assert told.count("lenz: ") == 1, "the first call alone compares"


def test_graphs_that_are_watched_are_not_compared(
    faster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eager would run no kernel that could be watched."""
    run = begun(lambda x: x.sqrt() + 1, nans=True)
    torch.testing.assert_close(run(torch.ones(8)), torch.full((8,), 2.0))
    with pytest.raises(FloatingPointError, match="NaN"):
        run(-torch.ones(8))
    assert "eager" not in capsys.readouterr().err


class Net(nn.Module):
    """Running statistics, a counter, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.head(self.norm(x)), 0.5)


@pytest.mark.one_in(1)
def test_a_step_of_training_is_seen_once(faster: str) -> None:
    torch.manual_seed(3)
    model = Net()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    x = randn(16, 6)
    found = []
    for options in ({}, {"compare_eager": True}):
        torch._dynamo.reset()
        model.load_state_dict(start)
        model.zero_grad()
        torch.manual_seed(5)
        run = torch.compile(model, backend="lenz", options={"eager_random": True, **options})
        run(x).sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        found.append([*grads, *(b.clone() for b in model.buffers()), torch.rand(3)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert model.norm.num_batches_tracked is not None and model.norm.num_batches_tracked.item() == 1


def test_arguments_that_are_written(faster: str) -> None:
    run, x = begun(lambda x, y: x.add_(y).mul_(2)), torch.ones(4, 3).t()
    run(x, torch.ones(3, 1))
    assert torch.equal(x, torch.full((3, 4), 4.0)), "the comparison wrote into the argument"


def test_what_may_be_seen_twice_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    @torch.library.custom_op("lenz_test::noted", mutates_args=())
    def noted(x: Tensor) -> Tensor:
        calls.append(1)
        return x + 1

    noted.register_fake(torch.empty_like)
    run = begun(lambda x: noted(x) * 2)
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 4.0))
    assert calls == [1]
    assert "is not compared with eager: a second run might be visible" in capsys.readouterr().err


def test_a_failed_comparison_leaves_lenz(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*_: Any) -> list[float]:
        raise MemoryError("no room")

    monkeypatch.setattr(compare, "times", failed)
    run = begun(lambda x: x * 2 + 1)
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 3.0))
    assert "is not compared with eager: MemoryError: no room" in capsys.readouterr().err


def test_copies_lie_as_their_originals() -> None:
    flat = torch.arange(24.0)
    for x in (
        flat.view(4, 6).t(), flat[::3], flat[5:6], torch.ones(1).expand(3), flat[:0],
        torch.tensor(2.0), flat.view(2, 3, 4)[:, 1], flat.clone().requires_grad_(),
        (flat.clone().requires_grad_() * 2).view(6, 4),
    ):  # fmt: skip
        made = compare._copy(x)
        assert torch.equal(made, x) and made.stride() == x.stride()
        assert made.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel()
        assert (made.requires_grad, made.is_leaf) == (x.requires_grad, x.is_leaf)
    assert compare._copy(3) == 3
