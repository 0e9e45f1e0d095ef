"""Reductions against eager in double precision, by the interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lenz.ir.graph import Extern
from tests.lower.harness import check, lowered

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
EVERY = (*FLOATS, *INTS, torch.bool)
SHAPES = ((), (7,), (3, 5), (2, 1, 4, 3))


def made(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values of the type: distinct enough for extrema, small enough for products."""
    g = torch.Generator().manual_seed(sum(shape) + 31 * len(shape))
    if dtype is torch.bool:
        return torch.rand(shape, generator=g) > 0.3
    if dtype.is_floating_point:
        return torch.randn(shape, generator=g).to(dtype)
    low = 0 if dtype is torch.uint8 else -5
    return torch.randint(low, 6, shape, generator=g).to(dtype)


def variants(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensor, and the same shape with other strides."""
    x = made(shape, dtype)
    if len(shape) < 2:
        return [x]
    wide = made((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]
    return [x, wide.transpose(0, -1).contiguous().transpose(0, -1) if len(shape) == 4 else wide]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", EVERY, ids=str)
@pytest.mark.parametrize("name", ["sum", "prod", "any", "all", "count_nonzero", "amax", "amin"])
def test_full_and_along(name: str, dtype: torch.dtype) -> None:
    """Over everything and over one dimension, all element types."""
    fn: Callable[..., Any] = getattr(torch, name)
    # The index arithmetic does not depend on the type: all shapes for two types will do.
    full = dtype in (torch.float32, torch.int64)
    for shape in SHAPES if full else ((), (3, 5)):
        for x in variants(shape, dtype) if full else [made(shape, dtype)]:
            check(lambda x: fn(x), x)
            if shape:
                check(lambda x: fn(x, -1), x)
                check(lambda x: fn(x, 0), x)
            if shape and name != "count_nonzero":
                check(lambda x: fn(x, 0, keepdim=True), x)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_mean_var_std(dtype: torch.dtype) -> None:
    """Means and spreads of floats in all overloads."""
    for shape in ((5,), (3, 5)):
        for x in variants(shape, dtype):
            check(lambda x: x.mean(), x)
            check(lambda x: x.mean(-1, keepdim=True), x)
            for name in ("var", "std", "var_mean", "std_mean"):
                fn = getattr(torch, name)
                check(lambda x: fn(x), x)
                check(lambda x: fn(x, False), x)
                check(lambda x: fn(x, -1, unbiased=False), x)
                check(lambda x: fn(x, 0, keepdim=True, correction=2), x)
                check(lambda x: fn(x, dim=None, correction=0.5), x)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_variance_of_few_and_none() -> None:
    """A correction that takes all degrees of freedom gives inf or NaN, as does an empty row."""
    x = torch.randn(3, 1)
    for correction in (0, 1, 2):
        check(lambda x: x.var(1, correction=correction), x)
    for lost in (5, math.nan, math.inf, -math.inf):
        check(lambda x: x.var(1, correction=lost), torch.randn(3, 4))
    check(lambda x: torch.var_mean(x, 1), torch.randn(3, 0))
    check(lambda x: torch.std_mean(x, 1, correction=-2), torch.randn(3, 0))
    check(lambda x: x.var(), torch.randn(()))
    check(lambda x: x.std(1), torch.tensor([[1.0, math.inf], [math.nan, 1.0], [2.0, 2.0]]))


def test_variance_far_from_zero() -> None:
    """Two passes keep the variance of values whose mean is 10^4 times their deviation."""
    x = torch.randn(64, dtype=torch.float64).float() + 1e4
    check(lambda x: x.var(), x, tolerance=(1e-4, 0.0))


@pytest.mark.parametrize("name", ["sum", "mean", "prod"])
def test_dtype_argument(name: str) -> None:
    """Elements are converted before they are accumulated."""
    fn = getattr(torch, name)
    for source in (torch.float32, torch.float16, torch.int32, torch.bool):
        x = made((3, 5), source)
        for to in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32):
            if to.is_floating_point or (name != "mean" and not source.is_floating_point):
                check(lambda x: fn(x, dtype=to), x)
                check(lambda x: fn(x, 1, keepdim=True, dtype=to), x)
    if name != "mean":
        check(lambda x: fn(x * 1.75, dtype=torch.int32), made((3, 5), torch.float32), exact=True)
        check(lambda x: fn(x, dtype=torch.bool), made((3, 5), torch.int32))


def test_many_dimensions() -> None:
    """Lists of dimensions, negative ones, and what an empty list means."""
    x = torch.randn(2, 3, 4, 5)
    for dims in ((0, 2), (-1, 1), (3,), (), (0, 1, 2, 3)):
        for keepdim in (False, True):
            check(lambda x: x.sum(dims, keepdim=keepdim), x)
            check(lambda x: x.mean(dims, keepdim=keepdim), x)
            check(lambda x: x.amax(dims, keepdim=keepdim), x)
            check(lambda x: torch.any(x > 0, dims, keepdim=keepdim), x)
            check(lambda x: torch.all(x > -9, dims, keepdim=keepdim), x)
            check(lambda x: x.var(dims, keepdim=keepdim), x)
            if dims:
                check(lambda x: torch.nansum(x, dims, keepdim=keepdim), x)
                check(lambda x: x.logsumexp(dims, keepdim=keepdim), x)
                check(lambda x: torch.count_nonzero(x > 0, dims), x)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", (*FLOATS, *INTS), ids=str)
def test_positions(dtype: torch.dtype) -> None:
    """argmax and argmin; max and min with their positions."""
    full = dtype in (torch.float32, torch.int64)
    for shape in SHAPES if full else ((), (3, 5)):
        for x in variants(shape, dtype) if full else [made(shape, dtype)]:
            for name in ("argmax", "argmin"):
                fn = getattr(torch, name)
                check(lambda x: fn(x), x)
                check(lambda x: fn(x, -1), x)
                check(lambda x: fn(x, 0, keepdim=True), x)
            for name in ("max", "min"):
                fn = getattr(torch, name)
                check(lambda x: fn(x), x)
                check(lambda x: tuple(fn(x, -1)), x)
                check(lambda x: tuple(fn(x, 0, keepdim=True)), x)


def test_positions_of_equals_nan_and_bool() -> None:
    """NaN wins, bool has positions too."""
    nan = math.nan
    x = torch.tensor([[1.0, nan, 3.0], [nan, nan, 0.0], [-math.inf, -math.inf, -math.inf]])
    for name in ("max", "min"):
        fn = getattr(torch, name)
        check(lambda x: tuple(fn(x, 1)), x)
        check(lambda x: fn(x), x)
        check(lambda x: tuple(fn(x, 1)), torch.tensor([[False, True], [True, False]]))
    check(lambda x: x.argmax(1), x)
    check(lambda x: x.argmin(1), x)
    check(lambda x: x.amax(1), x)
    check(lambda x: tuple(torch.aminmax(x)), x)


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int32, torch.bool), ids=str)
def test_aminmax(dtype: torch.dtype) -> None:
    """Both extrema in one call."""
    for shape in ((), (7,), (3, 5)):
        x = made(shape, dtype)
        check(lambda x: tuple(torch.aminmax(x)), x)
        check(lambda x: tuple(torch.aminmax(x, dim=0, keepdim=True)), x)


def test_empty() -> None:
    """The neutral elements, where eager has them."""
    for x in (torch.randn(0), torch.randn(3, 0), torch.randn(0, 4)):
        check(lambda x: x.sum(), x)
        check(lambda x: x.sum(-1), x)
        check(lambda x: x.prod(), x)
        check(lambda x: x.mean(0), x)
        check(lambda x: torch.any(x, -1), x)
        check(lambda x: torch.all(x, 0), x)
        check(lambda x: x.logsumexp(-1), x)
        check(lambda x: torch.count_nonzero(x), x)
        check(lambda x: torch.linalg.vector_norm(x), x)
    check(lambda x: x.amax(1), torch.randn(0, 4))
    check(lambda x: x.argmax(1), torch.randn(0, 4))


def test_truth_of_nan_and_bytes() -> None:
    """NaN is true; u8 gives u8."""
    check(lambda x: (torch.any(x), torch.all(x)), torch.tensor([math.nan, 0.0]))
    check(lambda x: (x.any(), x.all(), x.any(0), x.all(0)), torch.tensor([[0, 3], [2, 0]]).byte())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [0, 1, 2, 3, 0.5, -1, -2.5, math.inf, -math.inf])
def test_norms(dtype: torch.dtype, p: float) -> None:
    """Vector norms of every order, in both families of ops."""
    x = made((3, 4, 5), dtype)
    loose = (1e-4, 1e-5) if dtype is torch.float32 else None
    norm = torch.linalg.vector_norm
    check(lambda x: norm(x, p), x, tolerance=loose)
    check(lambda x: norm(x, p, dim=(0, 2), keepdim=True), x, tolerance=loose)
    check(lambda x: norm(x, p, dim=1), x, tolerance=loose)
    check(lambda x: torch.norm(x, p, dim=-1), x, tolerance=loose)
    check(lambda x: torch.ops.aten.norm.Scalar(x, p), x, tolerance=loose)
    check(lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, p, [1], True), x, tolerance=loose)
    if dtype is not torch.float64:
        check(lambda x: norm(x, p, dtype=torch.float64), x, tolerance=(1e-9, 1e-9))
    if dtype in (torch.float32, torch.float64):
        check(lambda x: torch.dist(x, x[:1] + 1, p), x, tolerance=loose)


@pytest.mark.parametrize("p", (0, 0.5, 2, 3, -2, math.inf))
def test_norms_of_one_element(p: float) -> None:
    """They are its size, whose powers may overflow."""
    x = torch.tensor([3e38, -1e-30, 1e-40, 0.0])
    for norm in (torch.linalg.vector_norm, torch.norm):
        check(lambda x, norm=norm: (norm(x[:, None], p, dim=1), norm(x[0], p)), x)


def test_logsumexp() -> None:
    """Large values, infinities, integers, halves."""
    inf = math.inf
    rows = torch.tensor([[1e4, 1e4], [-inf, -inf], [inf, 1.0], [inf, -inf], [math.nan, 1.0]])
    check(lambda x: x.logsumexp(1), rows)
    check(lambda x: x.logsumexp((0, 1), keepdim=True), torch.randn(3, 5))
    check(lambda x: x.logsumexp(0), torch.randint(0, 5, (3, 4)))
    for dtype in FLOATS:
        check(lambda x: x.logsumexp(-1), made((4, 6), dtype))


def test_nansum_and_trace() -> None:
    """NaN counts as zero; the diagonal of matrices that are not square."""
    x = torch.tensor([[math.nan, 1.0, 2.0], [3.0, math.nan, math.inf]])
    check(lambda x: (torch.nansum(x), torch.nansum(x, 1), torch.nansum(x.half(), 0)), x)
    check(lambda x: torch.nansum(x), torch.arange(5))
    for shape in ((3, 3), (2, 5), (5, 2)):
        check(lambda x: torch.trace(x), torch.randn(shape))
        check(lambda x: torch.trace(x), torch.randint(0, 9, shape))


def test_symbolic_sizes() -> None:
    """Counts and positions follow the sizes of the call."""
    x = torch.randn(4, 6)
    check(lambda x: (x.mean(), x.mean(1), x.sum(0)), x, dynamic=True)
    check(lambda x: (x.var(0), *torch.std_mean(x, 1, keepdim=True)), x, dynamic=True)
    check(lambda x: (x.argmax(), *x.max(1), x.logsumexp(0)), x, dynamic=True)
    check(lambda x: (torch.linalg.vector_norm(x), torch.trace(x)), x, dynamic=True)


def test_one_pass_where_one_is_enough() -> None:
    """The number of loops is what the formula needs, not more."""
    x = torch.randn(4, 6)
    assert len(lowered(lambda x: x.mean(1), (x,)).nodes) == 1
    both = lowered(lambda x: tuple(torch.var_mean(x, 1)), (x,)).nodes  # the mean is rounded last
    assert [type(n).__name__ for n in both].count("Reduction") == 2 and len(both) == 3
    parts = lowered(lambda x: x.logsumexp(1), (x,)).nodes
    assert [type(n).__name__ for n in parts].count("Reduction") == 2


def test_eager_keeps_what_it_refuses() -> None:
    """argmax of bool is left to eager, which raises its own error."""
    x = torch.tensor([True, False])
    try:
        g = lowered(lambda x: x.argmax(), (x,))
    except RuntimeError:
        return  # refused while tracing: fine as well
    assert isinstance(g.nodes[0], Extern)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", (*FLOATS, *INTS), ids=str)
def test_products_of_vectors(dtype: torch.dtype) -> None:
    """dot, mv of both layouts, addmv; integers wrap, and beta = 0 hides NaN."""
    m, x, y = made((3, 40), dtype), made((40,), dtype), made((3,), dtype)
    factors = (2, 3) if dtype in INTS else (0.5, 1.5)
    for dynamic in (False, True):
        check(lambda m, x: (m @ x, x @ x, m.t().mv(m[:, 0])), m, x, dynamic=dynamic)
        check(
            lambda y, m, x: torch.addmv(y, m, x, beta=factors[0], alpha=factors[1]),
            y, m, x, dynamic=dynamic,
        )  # fmt: skip
    check(lambda m, x: (m[:, :0] @ x[:0], x[:0] @ x[:0], m[:0] @ x), m, x)
    if dtype in FLOATS:
        check(lambda y, m, x: torch.addmv(y * math.nan, m, x, beta=0), y, m, x)
        check(lambda y, m, x: y[0].addmv(m, x), y, m, x)


def test_no_sum_is_minus_zero() -> None:
    for shape in ((1, 1), (1, 3), (4, 2)):
        x = torch.full(shape, -0.0)
        check(lambda x: (1 / x.sum(1), 1 / x.sum(), 1 / x[0, 0].sum(), 1 / x.mean(0)), x)
        check(lambda x: (1 / x.prod(1), 1 / x.amax(1), 1 / x.trace(), 1 / x.nansum(1)), x)


def test_a_scale_of_zero_is_left_to_eager() -> None:
    """With alpha = 0, most of its kernels ignore NaN in the product."""
    m, x, c = torch.full((1200, 4), math.nan), torch.ones(4, 8), torch.ones(1200, 8)
    check(lambda c, m, x: c.addmm(m, x, alpha=0), c, m, x, native=False)
    check(lambda c, m, x: c[:, 0].addmv(m, x[:, 0], alpha=0), c, m, x, native=False)
