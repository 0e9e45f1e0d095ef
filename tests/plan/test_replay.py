"""Plans around CUDA graphs, on a CPU: the steps of a graph run where it would be captured.

What a graph reads, writes, keeps and copies is as on a GPU, so that a name that is missing or
memory that is not the caller's is found here. Which steps are outside is chosen by the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

from lenz import replay
from lenz.ir.plan import CallStep, Check, LaunchStep, Step
from lenz.machine.cuda import graph
from lenz.plan import graphs
from lenz.runtime import executor


class Simulated(graph._Capture):
    """A capture that runs its steps."""

    def launch(self, s: LaunchStep) -> list[int]:
        return graph.Runner.launch(self, s)

    def copy(self, jobs: Any) -> None:
        for _, to, start, _ in jobs:
            n = graph.extent(to) // to.itemsize
            flat = [torch.as_strided(t, (n,), (1,), t.storage_offset()) for t in (to, start)]
            flat[0].copy_(flat[1])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[replay.Replayed]:
    """The plans, whose graphs are simulated in the first call."""
    found: list[replay.Replayed] = []

    class Noted(replay.Replayed):
        gpu = 0

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

        def linked(self, *args: Any) -> None:
            return None

    def capture(w: Any, like: Any, *where: Any) -> Any:
        run = Simulated(w, like, 0, 0)
        with torch.no_grad():
            run.all()
        return SimpleNamespace(kept=run.results)

    monkeypatch.setattr(replay, "Replayed", Noted)
    monkeypatch.setattr(replay, "WARM", 0)
    monkeypatch.setattr(replay, "capture", capture)
    monkeypatch.setattr(replay, "start", lambda *args: None)
    monkeypatch.setattr(replay, "pool", lambda *args: None)
    monkeypatch.setattr(replay, "Pool", lambda *args: None)
    monkeypatch.setattr(executor, "stream", lambda gpu: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda d: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(graphs, "_device", lambda steps: "cpu")
    return found


def cut(monkeypatch: pytest.MonkeyPatch, every: int, calls: bool) -> None:
    """Leave some steps outside: one launch of so many, library calls perhaps, and checks."""
    count = 0

    def refusal(s: Step, *facts: Any) -> str:
        nonlocal count
        count += isinstance(s, LaunchStep | CallStep)
        if isinstance(s, Check) or (calls and isinstance(s, CallStep)):
            return "not here"
        return "not this one" if isinstance(s, LaunchStep) and every and not count % every else ""

    monkeypatch.setattr(graphs, "_refusal", refusal)


def compiled(fn: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    options = {"cuda_graphs": "on", "cache": False, **how}
    return torch.compile(fn, backend="lenz", options=options)


def layers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = torch.softmax(x @ w, -1)
    y = torch.cat([h, h.t() @ h]).cumsum(0)
    return y.t(), (y @ w)[1:], h.sort(-1).values, x, (h @ w).exp() @ w


def embedded(x: Tensor, w: Tensor) -> Tensor:
    ids = x.abs().argmax(-1)
    return F.dropout(F.layer_norm(w[ids] @ w, (8,)), 0.5) @ w.cumsum(1)


def written(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(2)
    y = x @ w
    x.add_(y.softmax(-1) @ w)
    return y.relu()


CASES = {"layers": layers, "embedded": embedded, "written": written}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("every", [0, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_results(
    name: str, every: int, calls: bool, made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, every, calls)
    fn, x, w = CASES[name], randn(8, 8), randn(8, 8)
    mine, theirs = x.clone(), x.clone()
    torch.manual_seed(1)
    got = compiled(fn)(mine, w)
    torch.manual_seed(1)
    want = torch.compile(fn, backend="lenz", options={"cache": False})(theirs, w)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine, theirs)
    (r,) = made
    if name == "layers" and not calls:
        assert r.why == "native code does not run it", "it has been captured"


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_training(
    fails: bool, every: int, made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both halves; also where capturing fails, from the second graph on."""
    cut(monkeypatch, every, calls=False)
    if fails:
        real, tries = getattr(replay, "capture"), []  # noqa: B009 - the one of the fixture

        def capture(*args: Any) -> Any:
            tries.append(1)
            if len(tries) > 1 or not every:
                raise RuntimeError("operation not permitted when stream is capturing")
            return real(*args)

        monkeypatch.setattr(replay, "capture", capture)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(144, 5)
    )
    x = randn(2, 3, 8, 8)
    parameters = [*model.parameters()]
    got = torch.autograd.grad(compiled(lambda x: model(x).square().sum())(x), parameters)
    want = torch.autograd.grad(model(x).square().sum(), parameters)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(made) == 2
    if fails:
        assert "not permitted" in made[1].why


def test_arguments_that_the_plan_does_not_take(
    made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No graph is made for other strides, dtypes, classes or sizes, or for bits of the sign."""
    cut(monkeypatch, 0, calls=False)
    x, w = randn(8, 8), randn(8, 8)
    run = compiled(lambda x, w: torch.softmax(x @ w, -1) @ w)
    run(x, w)
    (r,) = made

    class Other(Tensor):
        pass

    assert replay.takes(r.given.plan, [x, w]) and replay.takes(r.given.plan, [nn.Parameter(x), w])
    for other in (
        x.t(),
        x.double(),
        x.as_subclass(Other),
        torch._neg_view(x),
        randn(8, 9),
        3,
        None,
    ):
        assert not replay.takes(r.given.plan, [other, w])
