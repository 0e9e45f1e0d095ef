"""Embedding bags of one size and their gradients against eager, by the interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.cuda import Fake, fake_cuda, programs_of
from tests.lower.harness import check

aten = torch.ops.aten
W = torch.randn(11, 6)
IDX = torch.tensor([[1, 4, 3], [0, 0, 10], [3, 3, 3], [7, 2, 5]])
WEIGHTS = torch.randn(4, 3)


@pytest.mark.parametrize("mode", ("sum", "mean", "max"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
def test_bags_of_one_size(mode: str, dtype: torch.dtype) -> None:
    def fn(w: Any, i: Any) -> Any:
        out = aten._embedding_bag(w, i.view(-1), torch.arange(0, 12, 3), False, MODES[mode])
        return (out[0], *(out[1:] if mode == "max" else out[1:3] if mode == "mean" else ()))

    check(fn, W.to(dtype), IDX)
    check(lambda w, i: F.embedding_bag(i, w, mode=mode), W.to(dtype), IDX.int())
    w = torch.cat([torch.tensor([[1.0, math.nan], [2, 3], [math.nan, 0]]), W[:, :2]])
    check(fn, w.to(dtype), IDX % 3)  # the maximum is a first NaN, and passes over others


MODES = {"sum": 0, "mean": 1, "max": 2}


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_padding_and_weights(dynamic: bool) -> None:
    for mode in ("sum", "mean"):
        check(
            lambda w, i, m=mode: F.embedding_bag(i, w, mode=m, padding_idx=3),
            W, IDX, dynamic=dynamic,
        )  # fmt: skip
    check(
        lambda w, i, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s), W, IDX, WEIGHTS,
        dynamic=dynamic,
    )  # fmt: skip


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("padding", (-1, 3))
@pytest.mark.parametrize("mode", (0, 1, 2))
def test_gradients_of_bags_of_any_size(mode: int, padding: int) -> None:
    i, offsets = IDX.view(-1), torch.tensor([0, 2, 2, 9, 12])
    _, bag, size, best = aten._embedding_bag(
        W, i, offsets, False, mode, False, None, False, padding
    )
    weights = WEIGHTS.view(-1) if mode == 0 else None
    back = aten._embedding_bag_backward

    def fn(g: Any, i: Any, o: Any, bag: Any, size: Any, best: Any, s: Any = None) -> Any:
        return back(g, i, o, bag, size, best, 11, False, mode, False, s, padding)

    given = (torch.randn(5, 6), i, offsets, bag, size, best)
    check(fn, *given)
    if mode == 0:
        check(fn, *given, weights)
        sample = aten._embedding_bag_per_sample_weights_backward
        check(lambda g, w, i, o, bag: sample(g, w, i, o, bag, 0, padding), given[0], W, *given[1:4])


def test_gradients_of_bags_at_constants() -> None:
    """A tensor made from numbers is no fake tensor; such a gradient took the graph to eager."""
    i, grads = IDX.view(-1), []
    fn = lambda w: F.embedding_bag(i, w, torch.tensor([0, 1, 1, 4]), mode="sum")
    for backend in ("eager", "lenz"):
        w = W.clone().requires_grad_()
        torch.compile(fn, backend=backend)(w).square().sum().backward()
        grads.append(w.grad)
    torch.testing.assert_close(*grads)


def test_sums_of_bf16_whose_bags_eager_leaves_out() -> None:
    """Fake tensors tell a full list of bags, and eager's kernel of CPUs gives an empty one."""
    i, offsets = IDX.view(-1), torch.tensor([0, 2, 2, 9])
    grads = []
    for backend in ("eager", "lenz"):
        w = W.bfloat16().requires_grad_()
        run = torch.compile(lambda w: F.embedding_bag(i, w, offsets, mode="sum"), backend=backend)
        run(w).sum().backward()
        grads.append(w.grad)
    torch.testing.assert_close(*grads)


def test_a_row_outside_is_an_error_and_other_bags_stay_eager() -> None:
    with pytest.raises(Exception, match=r"out of (range|bounds)"):
        check(lambda w, i: F.embedding_bag(i, w), W, IDX + 5)
    offsets = torch.tensor([0, 2, 2, 9])
    check(lambda w, i, o: F.embedding_bag(i.view(-1), w, o), W, IDX, offsets, native=False)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("mode", ("sum", "mean", "max"))
def test_a_last_offset_is_no_bag_on_gpus(mode: str) -> None:
    """There the sizes of bags have one element more than the gradient has rows."""

    def fn(w: torch.Tensor, i: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(i, w, o, mode=mode, include_last_offset=True)

    def ints(n: int) -> torch.Tensor:
        return Fake((n,), torch.int64).make()

    with fake_cuda():
        table = Fake((5, 4), torch.float32, grad=True).make()
        halves = programs_of(fn, table, ints(6), ints(3))
    assert [p.kind for p in halves] == ["forward", "backward"]
