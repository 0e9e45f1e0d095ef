"""A plan with its kernels is complete: another process runs it and compiles nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.check import SAVED
from tests.fuzz.generator import program
from tests.fuzz.program import analyse
from tests.models.families import MODELS, example
from tests.plan.beside import Beside, beside

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    with beside(tmp_path_factory.mktemp("alone")) as found:
        yield found


@pytest.fixture
def run(alone: Beside, tmp_path: Path) -> Callable[..., Any]:
    """Calls a function; its plans come from no cache."""

    def call(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, **how: Any) -> Any:
        torch._dynamo.reset()
        options = {"cache_dir": str(tmp_path / str(alone.plans)), "on_error": "raise", **how}
        return torch.compile(fn, backend="lenz", dynamic=dynamic, options=options)(*args)

    return call


def attention(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1) + x.sum(0)


def written(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    w.mul_(2)
    return F.dropout(x, 0.5), w[1:] + 0, x.topk(2).values


def known(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + w.to(torch.float16)[::2].sum()


def trained(x: Tensor, w: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    return torch.autograd.grad(F.gelu(x @ w).square().sum(), w)[0]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [attention, written, known, trained])
def test_plans_run_where_nothing_compiles(
    alone: Beside, run: Callable[..., Any], fn: Callable[..., Any], dynamic: bool, native: bool
) -> None:
    before = alone.calls
    run(fn, torch.randn(4, 4), torch.randn(4, 4), dynamic=dynamic, native=native)
    assert alone.calls > before


def test_another_result_is_found(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.plan.beside.copied", lambda args: [a + 1 for a in args])
    with pytest.raises(AssertionError, match="value 0 of"):
        run(attention, torch.randn(4, 4), torch.randn(4, 4))


def test_an_error_is_raised_in_both(alone: Beside, run: Callable[..., Any]) -> None:
    before = alone.calls
    with pytest.raises(IndexError):
        run(lambda x, i: x[i] + 1, torch.randn(4, 4), torch.tensor([9]))
    assert alone.calls == before + 1


def random_program(run: Callable[..., Any], seed: int) -> None:
    p = program(seed)
    if analyse(p) is None:
        return
    try:
        p.function()(*p.arguments())
    except Exception:  # noqa: BLE001  # not a program
        return
    args = p.arguments()
    try:
        with getattr(torch, p.mode)() if p.mode else warnings.catch_warnings():
            results = run(p.function(), *args, dynamic=p.dynamic or None)
        outs = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
        if outs:
            sum(x.sum() for x in outs).backward()
    except RuntimeError as e:  # while it is traced, or in its backward
        if SAVED not in f"RuntimeError: {e}":
            raise


@pytest.mark.one_in(40, 20)
@pytest.mark.parametrize("first", range(0, 200, 5))
def test_random_programs(alone: Beside, run: Callable[..., Any], first: int) -> None:
    before = alone.calls
    for seed in range(first, first + 5):
        random_program(run, seed)
    assert alone.calls > before + 2


@pytest.mark.one_in(60)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_models(alone: Beside, run: Callable[..., Any], name: str) -> None:
    made, before = example(name), alone.calls
    with torch._dynamo.config.patch(**made.dynamo):
        loss = lambda *inputs: made.loss(made.forward(made.module, *inputs), *inputs)
        if made.trained:
            run(loss, *made.inputs).backward()
        else:
            run(lambda *inputs: made.forward(made.module, *inputs), *made.inputs)
    assert alone.calls > before
