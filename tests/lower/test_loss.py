"""Losses and their gradients against eager, by the interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from lenz.ir.interp import interp
from tests.lower.harness import TOLERANCE, check, lowered
from tests.lower.single import outputs_of

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = ((3, 5), (7,), (), (0,))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_differences(reduction: int, dtype: torch.dtype) -> None:
    """Losses of x - y, and their gradients."""
    calls: list[tuple[Any, Any, tuple[float, ...]]] = [
        (aten.mse_loss, aten.mse_loss_backward, ()),
        (aten.smooth_l1_loss, aten.smooth_l1_loss_backward, (0.7,)),
        (aten.huber_loss, aten.huber_loss_backward, (0.7,)),
        (aten.soft_margin_loss, aten.soft_margin_loss_backward, ()),
    ]
    for shape in SHAPES:
        x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        g = torch.randn(shape if reduction == 0 else ()).to(dtype)
        for forward, backward, more in calls:
            check(lambda x, y: forward(x, y, reduction, *more), x, y)
            if x.numel() > 0:  # the trace of the mean's gradient divides by the size
                check(lambda g, x, y: backward(g, x, y, reduction, *more), g, x, y)


def test_edges_of_differences() -> None:
    """The borders of the cases, NaN, and values that overflow in a naive form."""
    x = torch.tensor([-1.0, 1.0, 0.0, -0.5, 0.5, math.nan, math.inf, 40.0])
    y, g = torch.zeros(8), torch.randn(8)
    for width in (1.0, 0.5):
        check(lambda x, y: aten.smooth_l1_loss(x, y, 0, width), x, y)
        check(lambda x, y: aten.huber_loss(x, y, 0, width), x, y)
        check(lambda g, x, y: aten.smooth_l1_loss_backward(g, x, y, 0, width), g, x, y)
        check(lambda g, x, y: aten.huber_loss_backward(g, x, y, 0, width), g, x, y)
    check(lambda x, y: aten.huber_loss(x, y, 0, math.inf), x, y)  # infinity is not below itself
    check(lambda x, y: aten.smooth_l1_loss(x, y, 0, 0.0), x, y)
    check(lambda g, x, y: aten.smooth_l1_loss_backward(g, x, y, 0, 0.0), g, x, y)
    check(lambda x, y: aten.soft_margin_loss(x, y - 1, 0), x, y)
    check(lambda x: aten.mse_loss(x, x[:1] + 1), torch.randn(3, 4))


def same(op: Any, *args: Any) -> None:
    """One op that tracing would take apart, against eager."""
    (got,) = outputs_of(op, *args)
    wanted = op(*args)
    rtol, atol = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_binary_cross_entropy(reduction: int, dtype: torch.dtype) -> None:
    """Probabilities and logits, weights, and the limits 0 and 1."""
    p = torch.tensor([[0.0, 1.0, 0.25], [0.5, 0.75, 1.0]]).to(dtype)
    y = torch.tensor([[1.0, 1.0, 0.5], [0.0, 0.25, 0.0]]).to(dtype)
    w = torch.rand(3).to(dtype)
    g = torch.randn((2, 3) if reduction == 0 else ()).to(dtype)
    bce, back = aten.binary_cross_entropy, aten.binary_cross_entropy_backward
    logits = aten.binary_cross_entropy_with_logits.default
    check(lambda p, y: bce(p, y, None, reduction), p, y)
    check(lambda p, y, w: bce(p, y, w, reduction), p, y, w)
    same(logits, p * 200 - 100, y, None, None, reduction)
    same(logits, p, y, w, w + 1, reduction)
    inside = p.clamp(0.1, 0.9)
    check(lambda g, p, y: back(g, p, y, None, reduction), g, inside, y)
    check(lambda g, p, y, w: back(g, p, y, w, reduction), g, inside, y, w)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_nll(reduction: int, dtype: torch.dtype) -> None:
    """Weights, ignored targets, all ignored, and the images' form."""
    w = torch.rand(4).to(dtype)
    for size, t in (
        ((5, 4), torch.tensor([0, 3, -100, 1, 2])),
        ((3, 4), torch.tensor([-100, -100, -100])),
        ((4,), torch.tensor(2)),
        ((0, 4), torch.empty(0, dtype=torch.int64)),
    ):
        x = torch.randn(size).to(dtype)
        for weight in (None, w):
            for ignored in (-100, 1):
                if ignored == 1 and bool((t < 0).any()):
                    continue

                def fn(x: Any, t: Any, *w: Any) -> Any:
                    given = w[0] if w else None
                    return aten.nll_loss_forward(x, t, given, reduction, ignored)

                more = () if weight is None else (weight,)
                check(fn, x, t, *more)
                total = fn(x, t, *more)[1]
                g = torch.randn(t.shape if reduction == 0 else ()).to(dtype)

                def back(g: Any, x: Any, t: Any, total: Any, *w: Any) -> Any:
                    given = w[0] if w else None
                    return aten.nll_loss_backward(g, x, t, given, reduction, ignored, total)

                check(back, g, x, t, total, *more)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_nll_of_images(reduction: int) -> None:
    """[N, C, H, W] with targets [N, H, W]."""
    x, w = torch.randn(2, 3, 4, 2), torch.rand(3)
    t = torch.randint(0, 3, (2, 4, 2))
    t[0, 1, 1] = -100
    g = torch.randn((2, 4, 2) if reduction == 0 else ())
    check(lambda x, t, w: aten.nll_loss2d_forward(x, t, w, reduction, -100), x, t, w)
    total = aten.nll_loss2d_forward(x, t, w, reduction, -100)[1]

    def back(g: Any, x: Any, t: Any, w: Any, total: Any) -> Any:
        return aten.nll_loss2d_backward(g, x, t, w, reduction, -100, total)

    check(back, g, x, t, w, total)


@pytest.mark.parametrize("bad", [4, -1, 1000])
def test_targets_out_of_range(bad: int) -> None:
    """Such a target raises IndexError, as in eager; an ignored one does not."""
    x, t = torch.randn(3, 4), torch.tensor([0, bad, 1])
    g = lowered(lambda x, t: functional.nll_loss(x, t), (x, torch.tensor([0, 1, 2])))
    with pytest.raises(IndexError):
        functional.nll_loss(x, t)
    with pytest.raises(IndexError):
        interp(g, (x, t))
    check(lambda x, t: functional.nll_loss(x, t, ignore_index=bad), x, t)


def test_cross_entropy_in_all_forms() -> None:
    """Class indices, probabilities, label smoothing; sizes that vary."""
    x, t = torch.randn(5, 4), torch.tensor([0, 3, 2, 1, 2])
    soft = torch.rand(5, 4).softmax(1)
    cross = functional.cross_entropy
    check(lambda x, t: cross(x, t), x, t, dynamic=True)
    check(lambda x, t: cross(x, t, reduction="sum"), x.bfloat16(), t)
    check(lambda x, t: cross(x, t), x, soft)
    check(lambda x, t: functional.kl_div(x, t, reduction="batchmean"), x, soft)
    check(lambda x, t: functional.l1_loss(x, t), x, soft)


def test_number_of_loops() -> None:
    """A loss without reduction is one loop, so is one with."""
    x = torch.randn(4, 6)
    assert len(lowered(lambda x: functional.huber_loss(x, x + 1), (x,)).nodes) == 2
    assert len(lowered(lambda x: aten.mse_loss(x, x, 0), (x,)).nodes) == 1
