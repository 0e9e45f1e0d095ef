"""Pooling and its gradients against eager, by the interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from lenz.ir.graph import Pointwise
from lenz.ir.printer import show
from tests.lower.harness import check, evaluated, lowered

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
# kernel, stride, padding, ceil_mode
FORMS: list[tuple[Any, Any, Any, bool]] = [
    (2, 2, 0, False),
    (3, 2, 1, False),
    (3, 2, 1, True),
    ((3, 2), (1, 2), (1, 0), False),
    (2, 3, 0, True),
    (3, 1, 1, False),
    (3, 3, 1, True),
]


def image(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random values of the type."""
    return torch.randn(shape).to(dtype)


def pair(v: Any) -> list[int]:
    """One number for both dimensions."""
    return [v, v] if isinstance(v, int) else list(v)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("include_pad", [True, False])
def test_avg_pool(form: tuple[Any, Any, Any, bool], include_pad: bool) -> None:
    """Divisors with padding, ceil_mode and override, forward and backward."""
    k, s, p, ceil = form
    for dtype in FLOATS:
        x = image((2, 3, 7, 6), dtype)
        for override in (None, 3):
            args = (pair(k), pair(s), pair(p), ceil, include_pad, override)
            check(lambda x: aten.avg_pool2d(x, *args), x)
            dy = image(tuple(aten.avg_pool2d(x, *args).shape), dtype)
            check(lambda dy, x: aten.avg_pool2d_backward(dy, x, *args), dy, x)


def test_a_gradient_tests_only_what_sizes_leave_open() -> None:
    """Of the nine windows around a position, the middle one is always there."""
    dy = x = torch.randn(1, 2, 7, 6)
    args = ([3, 3], [1, 1], [1, 1], False, True, None)
    g = lowered(lambda dy, x: aten.avg_pool2d_backward(dy, x, *args), [dy, x])
    # One comparison for each border: shared by the three windows beyond it.
    assert show(g).count("masked") == 8 and show(g).count("lt(") == 4


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_max_pool(form: tuple[Any, Any, Any, bool]) -> None:
    """Values and positions, and the gradient through the positions."""
    k, s, p, ceil = form
    for dilation in (1, 2):
        args = (pair(k), pair(s), pair(p), [dilation] * 2, ceil)
        for dtype in FLOATS:
            x = image((2, 3, 8, 7), dtype)
            check(lambda x: aten.max_pool2d_with_indices(x, *args), x)
            y, at = aten.max_pool2d_with_indices(x, *args)
            dy = image(tuple(y.shape), dtype)
            back = aten.max_pool2d_with_indices_backward
            check(lambda dy, x, at: back(dy, x, *args, at), dy, x, at)


def test_max_pool_of_nan_and_infinities() -> None:
    """NaN wins, the last one; of nothing but -inf the first place counts; so it does of equals."""
    inf, nan = math.inf, math.nan
    x = torch.tensor(
        [
            [nan, 1.0, nan, -inf],
            [nan, 2.0, -inf, -inf],
            [-inf, -inf, 5.0, 5.0],
            [-inf, -inf, 5.0, inf],
        ]
    )
    for padding in (0, 1):
        for dilation in (1, 2):
            args = ([2, 2], [1, 1], [padding] * 2, [dilation] * 2)
            check(lambda x: aten.max_pool2d_with_indices(x, *args), x[None, None])


def test_other_ranks_and_layouts() -> None:
    """3-d inputs, one and three pooled dimensions, channels last."""
    x = torch.randn(2, 3, 6, 4)
    last = x.to(memory_format=torch.channels_last)
    for y in (x[0], last):
        check(lambda y: functional.avg_pool2d(y, 2), y)
        check(lambda y: functional.max_pool2d(y, 3, 2, 1), y)
        check(lambda y: functional.adaptive_avg_pool2d(y, (3, 2)), y)
    check(lambda x: functional.avg_pool1d(x, 3, 2, 1), torch.randn(2, 3, 9))
    check(lambda x: functional.max_pool1d(x, 3, 2), torch.randn(2, 3, 9))
    check(lambda x: functional.avg_pool3d(x, 2, 1, 1), torch.randn(2, 3, 4, 3, 5))
    check(lambda x: functional.max_pool3d(x, 2), torch.randn(2, 3, 4, 4, 5))
    check(lambda x: functional.avg_pool2d(x, 7, 1, 3), torch.randn(1, 2, 9, 8))


ADAPTIVE = [((2, 3, 6, 4), (3, 2)), ((2, 3, 5, 5), (1, 5)), ((1, 2, 4, 4), (4, 4)),
            ((1, 2, 7, 11), (3, 4)), ((2, 1, 5, 3), (7, 9)), ((1, 2, 64, 5), (5, 2))]  # fmt: skip


@pytest.mark.parametrize(("shape", "out"), ADAPTIVE, ids=str)
def test_adaptive(shape: tuple[int, ...], out: tuple[int, int]) -> None:
    """Windows of one size and of several, wide ones and overlapping ones; gradients."""
    for dtype in FLOATS:
        x = image(shape, dtype)
        check(lambda x: aten._adaptive_avg_pool2d(x, out), x)
        dy = image(tuple(aten._adaptive_avg_pool2d(x, out).shape), dtype)
        check(aten._adaptive_avg_pool2d_backward, dy, x)
    check(lambda x: aten._adaptive_avg_pool3d(x, (*out, 2)), torch.randn(*shape, 3))
    check(lambda x: functional.adaptive_avg_pool2d(x, out), torch.randn(shape), dynamic=True)


def test_equal_windows_have_no_mask() -> None:
    """Parts of 56 / 5 overlap, and all have 12 elements."""
    for n, m, masks in ((56, 5, False), (56, 6, False), (56, 10, True)):
        g = check(lambda x, m=m: aten._adaptive_avg_pool2d(x, (m, m)), torch.randn(1, 2, n, n))
        assert ("masked" in show(g)) == masks


@pytest.mark.parametrize(("shape", "out"), ADAPTIVE, ids=str)
def test_adaptive_max(shape: tuple[int, ...], out: tuple[int, int]) -> None:
    """Values, positions and the gradient through them."""
    x = torch.randn(shape)
    check(lambda x: aten.adaptive_max_pool2d(x, out), x)
    y, at = aten.adaptive_max_pool2d(x, out)
    dy = torch.randn(y.shape)
    check(lambda dy, x, at: aten.adaptive_max_pool2d_backward(dy, x, at), dy, x, at)
    check(lambda x: aten.adaptive_max_pool3d(x, (2, 1, 2)), torch.randn(1, 2, 4, 3, 4))


def test_max_of_integers_and_unpooling() -> None:
    x = torch.arange(2 * 3 * 8 * 6).reshape(2, 3, 8, 6) * 7 % 64 - 30
    check(lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]), x)
    check(lambda x: aten.max_pool2d_with_indices(x.to(torch.int8), [7, 7], [1, 1], [3, 3]), x)
    y, at = aten.max_pool2d_with_indices(x.float(), [2, 2])
    check(lambda y, at: functional.max_unpool2d(y, at, 2), y, at)  # type: ignore[arg-type]
    gaps = y.transpose(2, 3).contiguous().transpose(2, 3)
    check(lambda y, at: functional.max_unpool2d(y, at, 2), gaps, at)  # type: ignore[arg-type]
    check(lambda y, at: functional.max_unpool1d(y[0, 0], at[0, 0] % 6, 2), y, at)  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"out of (range|bounds)"):
        check(lambda y, at: functional.max_unpool2d(y, at + 99, 2), y, at)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", (2, 3))
def test_windows_that_samples_spread(rank: int) -> None:
    """NaN, ties, one window, one element, no elements, halves."""
    pool = (aten.fractional_max_pool2d, aten.fractional_max_pool3d)[rank - 2]
    back = (aten.fractional_max_pool2d_backward, aten.fractional_max_pool3d_backward)[rank - 2]
    x = torch.randn(2, 3, *(9, 7, 6)[:rank]).mul(2).round() + 0.0
    x[0, 0, 2, 1:4] = float("nan")
    u = torch.rand(2, 3, rank)
    for kernel, outs in (([2, 3, 2], [4, 3, 4]), ([8, 3, 4], [1, 1, 1]), ([1, 1, 1], [8, 6, 5])):
        size = kernel[:rank], outs[:rank]
        for t in (x, x.double(), x[:0], x[0]):
            one = u[: t.shape[0]] if t.dim() == rank + 2 else u[:1]
            check(lambda t, u, s=size: pool(t, *s, u), t, one.to(t.dtype), exact=True)
        y, at = pool(x, *size, u)
        dy = torch.randn(y.shape)
        check(lambda dy, x, at, s=size: back(dy, x, *s, at), dy, x, at)
    check(lambda t, u: pool(t, [2] * rank, [3] * rank, u), x.half(), u.half(), native=False)
    for none in ([1, 0, 1], [0, 0, 0]):  # elements of a window
        check(lambda t, u: pool(t, none[:rank], [3] * rank, u), x, u, native=False)


def test_gradients_and_symbolic_sizes() -> None:
    """Forward and backward in one graph; sizes that vary."""
    x = torch.randn(2, 3, 8, 6)
    for fn in (
        lambda x: functional.avg_pool2d(x, 3, 2, 1),
        lambda x: functional.max_pool2d(x, 3, 2, 1),
    ):
        dy = torch.randn(fn(x).shape)

        def joint(dy: Any, x: Any, fn: Any = fn) -> Any:
            y, pull = torch.func.vjp(fn, x)
            return (y, *pull(dy))

        check(joint, dy, x)
        check(fn, x, dynamic=True)


def test_number_of_loops() -> None:
    """A small window is one loop."""
    assert (
        len(lowered(lambda x: functional.avg_pool2d(x, 2), (torch.randn(1, 1, 4, 4),)).nodes) == 1
    )


def test_sums_along_one_dimension_keep_the_order_of_the_result() -> None:
    """Else two of the three loops would transpose images with channels last."""
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    dy = torch.randn(2, 3, 7, 7).to(memory_format=torch.channels_last)
    g, (got,) = evaluated(aten._adaptive_avg_pool2d_backward, dy, x)
    torch.testing.assert_close(got, aten._adaptive_avg_pool2d_backward(dy, x))
    strides = [n.out.type.layout.stride for n in g.nodes if isinstance(n, Pointwise)]
    assert [[int(str(s)) for s in one] for one in strides] == [[336, 1, 48, 3], [768, 1, 48, 3]]


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_mean_of_nothing_is_an_error() -> None:
    fn = lambda x: functional.adaptive_avg_pool1d(x[x > 0][None, None], 3)
    run = torch.compile(fn, backend="lenz", fullgraph=True)
    with pytest.raises(RuntimeError, match="non-zero size"):
        run(-torch.rand(9))
    torch.testing.assert_close(run(torch.ones(9)), fn(torch.ones(9)))
