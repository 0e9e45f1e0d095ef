"""Calls that eager's kernels refuse and fake tensors let pass: lenz raises eager's error.

Each has beside it a call that eager takes and that is not left to eager for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lenz.frontend.refusals import is_refused

aten = torch.ops.aten
X, B, K = torch.ones(2, 3), torch.tensor([True, False]), torch.tensor([1, 2])
HALF, WIDE = torch.ones(4, dtype=torch.float16), torch.ones(4, dtype=torch.float64)
INT, BYTE = K.int(), K.to(torch.uint8)
ONE, TWO = torch.tensor([1]), torch.tensor([0, 1])
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "what is put broadcasts": (torch.index_put, (X, (TWO,), torch.ones(3, 3)), (X, (TWO,), X[0])),
    "indices broadcast": (
        torch.index_put, (X, (TWO, K.repeat(2)), X[0, 0]), (X, (TWO, TWO), X[0, 0])
    ),
    "as many as indices": (torch.index_add, (X, 1, TWO, X), (X, 1, TWO, X[:, :2])),
    "of the other sizes": (torch.index_add, (X, 0, TWO, X[:, :2]), (X, 0, TWO, X)),
    "an index is a row": (torch.index_select, (X, 0, TWO[None]), (X, 0, TWO)),
    "an index is of i64": (torch.index_copy, (X, 0, TWO.int(), X), (X, 0, TWO, X)),
    "a number is filled in": (torch.index_fill, (X, 0, TWO, torch.tensor(1j)), (X, 0, TWO, 1)),
    "a dimension that is there": (torch.softmax, (X[0], 1), (X, 1)),
    "a dimension to sort": (torch.sort, (X, -3), (X, -2)),
    "a part that is there": (torch.select_scatter, (X, X[0], 0, 2), (X, X[0], 0, 1)),
    "weights of one type": (
        aten.nll_loss_forward, (X, TWO, X[0].double(), 1, -100), (X, TWO, X[0], 1, -100),
    ),
    "a target of each pixel": (
        lambda x, y: F.nll_loss(x, y.long()), (torch.ones(1, 2, 3, 3), torch.zeros(1, 3, 2)),
        (torch.ones(1, 2, 3, 3), torch.zeros(1, 3, 3)),
    ),
    "alpha is whole": (lambda x, a: torch.add(x, x, alpha=a), (K, 1.5), (K, 2)),
    "alpha is a number": (lambda x, a: torch.add(x, x, alpha=a), (X, True), (B, True)),
    "powers of numbers": (torch.pow, (B, B), (B, 2)),
    "powers of signed numbers": (lambda x: 2**x, (K.to(torch.uint16),), (K,)),
    "bounds of numbers": (torch.clamp, (B, B, B), (K, K, K)),
    "quotients of numbers": (lambda x: torch.div(x, x, rounding_mode="trunc"), (B,), (K,)),
    "exponents": (torch.ldexp, (X[:, :2], B), (X[:, :2], K)),
    "kernels without halves": (torch.special.erfcx, (HALF,), (WIDE,)),
    "pools without halves": (
        lambda x: F.avg_pool3d(x, 2), (torch.ones(1, 2, 2, 2).half(),), (torch.ones(1, 2, 2, 2),),
    ),
    "one type": (torch.polar, (WIDE, WIDE.float()), (WIDE, WIDE)),
    "floats": (lambda x: F.mse_loss(x, x, reduction="sum"), (K,), (X,)),
    "losses of floats": (F.binary_cross_entropy_with_logits, (X[0, :2], K), (X[0, :2], K * 1.0)),
    "shapes of losses": (F.soft_margin_loss, (X[0, :1], X[0]), (X[0], X[0])),
    "as wide": (F.binary_cross_entropy, (X[0], X[0], X), (X, X, X[0])),
    "an order of i64": (
        lambda x, by: torch.searchsorted(x, x, sorter=by), (X[0], torch.arange(3).int()),
        (X[0], torch.arange(3)),
    ),
    "means of numbers": (
        lambda x, i: x.scatter_reduce(0, i, x, "mean"), (B[:0], TWO[:0]), (K[:0], TWO[:0]),
    ),
    "of no elements": (F.softsign, (B[:0],), (K[:0],)),
    "of no complex numbers": (lambda x: torch.where(x > 1, x, 0), (X[:0] * 1j,), (X[:0],)),
    "sums of no complex numbers": (lambda x: x.nansum(0), (X * 1j,), (X,)),
    "of no complex margins": (lambda x: x.clamp(min=0) + 1, (X[:0] * 1j,), (X[:0],)),
    "some elements": (lambda x: torch.median(x, 0).values, (X[:0],), (X,)),
    "the second dimension": (torch.index_select, (X, 1, K + 5), (X, 1, K)),
    "a place in a number": (
        lambda x, i: x.scatter_reduce(0, i, x, "amin"), (X[0, 0], K[0]), (X[0, 0], K[0] - 1)
    ),
    "a number's place": (lambda x, i: x.gather(0, i), (X[0, 0], K), (X[0, 0], K * 0)),
    "a sum at an end": (torch.index_add, (X, 0, K + 5, X), (X, 0, TWO, X)),
    "a sum in a row": (torch.index_add, (X[0], 0, K + 5, X[0, :2]), (X[0], 0, TWO, X[0, :2])),
    "a sum of more": (
        lambda x, i: torch.index_add(x, 0, i, x, alpha=2), (X, K + 5), (X, TWO)
    ),
    "a number of halves": (lambda x: x.masked_fill(x > 0, -1e9), (HALF,), (X,)),
    "a number of singles": (F.leaky_relu, (X, 1e39), (X, math.inf)),
    "a filled half": (lambda x, y: torch.full_like(x, 7e4) + y, (HALF, HALF), (X, X)),
    "a half's bound": (lambda x: x.clamp(min=1e5), (HALF,), (X,)),
    "a read number": (
        lambda x, y: x.masked_fill(x > 0, y), (K.to(torch.uint8), K[0] + 300), (K, K[0] + 300)
    ),
    "a read half": (
        torch.index_fill, (HALF, 0, K[:1], X[0, 0] + 1e5), (X, 0, K[:1], X[0, 0] + 1e5)
    ),
    "crops of what is there": (F.pad, (X, (4, -4)), (X, (4, -2))),
    "crops at the start": (F.pad, (X, (-4, 4)), (X, (-3, 4))),
    "a factor": (lambda x, a: torch.add(x, x, alpha=a), (INT, 2**35), (INT, 2)),
    "a factor of a number": (lambda x, a: torch.rsub(x, 1, alpha=a), (BYTE, 300), (BYTE, 3)),
    "a factor of products": (lambda x, a: x.addcmul(x, x, value=a), (BYTE, 300), (BYTE, 2)),
    "a factor of rows": (
        lambda x, a: x.addmv(x.outer(x), x, beta=a), (BYTE, 300), (BYTE, 2)
    ),
    "a factor at places": (
        lambda x, a: x.index_add(0, TWO, x, alpha=a), (BYTE, 300), (BYTE, 2)
    ),
    "a factor of a list": (lambda x, a: torch._foreach_add([x], [x], alpha=a), (BYTE, 300), (K, 2)),
    "a lower bound": (torch.clamp_min, (INT, 2**35), (INT, 2)),
    "bounds": (F.hardtanh, (INT.to(torch.int8), -200, 200), (INT, -200, 200)),
    "an exponent": (torch.pow, (BYTE, 300), (BYTE, 200)),
    "a divisor that is cast to 0": (torch.floor_divide, (INT, 2**35), (INT, 2**30)),
    "a remainder of 0": (torch.remainder, (INT, 2**35), (INT, 2**30)),
    "numbers up to an end": (
        lambda n: torch.linspace(0, n, 3, dtype=torch.uint8), (300,), (200,)
    ),
    "powers up to an end": (
        lambda n: torch.logspace(0, n, 3, dtype=torch.uint8), (300,), (2,)
    ),
    "a whole number of halves": (lambda x: x.masked_fill(x > 0, 2**31), (HALF,), (X,)),
    "a number of places": (lambda n: torch.tril_indices(3, 3, n), (2**63 - 1,), (1,)),
    "a start of a part": (
        lambda x, n: x.as_strided_scatter(x[:, :2], (2, 2), (1, 2), n), (X, -2), (X, 1)
    ),
    "steps that are none": (
        lambda n: torch.empty_strided((5, 5), (n, 1)).mul(0).isfinite() | True, (-2,), (5,)
    ),
    "a diagonal of positions": (
        lambda x, n: x.diagonal_scatter(x[0, :2], n), (X, -(2**63)), (X, 0)
    ),
    "a step of windows": (
        lambda x, n: F.max_pool2d(x, 2, n) + F.avg_pool2d(x, 2, n), (torch.ones(1, 1, 5, 6), 2**32),
        (torch.ones(1, 1, 5, 6), 2**30),
    ),
    "numbers up to a large one": (lambda n: torch.linspace(0, n, 3), (1e39,), (1e38,)),
    "a border of windows": (
        lambda x, n: F.unfold(x, 2, padding=n), (torch.ones(1, 1, 5, 6), -1),
        (torch.ones(1, 1, 5, 6), 1),
    ),
    "an inverse that is finite": (F.celu, (X, 1e-300), (X, 1e-30)),
    "a slope": (lambda x, b: F.smooth_l1_loss(x, x * 0, beta=b), (X, -1.0), (X, 0.0)),
    "a dimension of matrices": (lambda x, p: torch.mvlgamma(x + 9, p), (X, 0), (X, 1)),
    "a side": (
        lambda x, s: torch.searchsorted(x, x, side=s), (X[0], "middle"), (X[0], "right")
    ),
    "a range of a histogram": (
        lambda x, n: torch.histc(x, 5, 0, n), (X, math.inf), (X, 2.0)
    ),
    "places of an order": (
        lambda x, by: torch.searchsorted(x, x, sorter=by), (X[0], torch.arange(3) + 9),
        (X[0], torch.arange(3)),
    ),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CALLS)
def test_what_eager_refuses_raises_its_error(name: str) -> None:
    fn, wrong, right = CALLS[name]
    with pytest.raises(Exception) as wanted:
        fn(*wrong)
    run = torch.compile(fn, backend="lenz")
    with pytest.raises(type(wanted.value)) as got:
        run(*wrong)
    assert "a bug in lenz" not in str(got.value)
    got_right, want = run(*right), fn(*right)
    torch.testing.assert_close(got_right, want)


def test_what_eager_takes_is_left_to_no_call() -> None:
    """Rules that say too much would cost speed where it counts."""
    taken = (
        ("index_put", (X, (TWO,), X[0])), ("index_put", (X, (None, TWO), X[0, :2])),
        ("index_add", (X, 1, TWO, X[:, :2])), ("_softmax", (X, 1, False)), ("sort", (X, -2)),
        ("index_select", (X, 0, TWO)), ("pow", (X, K)), ("add", (K, X, )), ("clamp", (X, K)),
        ("pow", (2, B)), ("pow", (B, 2)), ("clamp", (B, 0, 1)),
        ("nll_loss_forward", (X, TWO, X[0], 1, -100)), ("special_erfcx", (WIDE,)),
        ("masked_fill", (X, X > 0, -math.inf)), ("masked_fill", (X, X > 0, X[0, 0])),
        ("mul", (HALF, 65504.0)), ("add", (X, -1e38)), ("masked_fill", (HALF, X > 0, -65504.0)),
        ("add", (INT, 2**35)), ("mul", (BYTE, 300)), ("div", (BYTE, 300)), ("pow", (2**35, X)),
        ("add", (HALF, 1e-12)), ("add", (X, 1.2e-38)), ("add", (WIDE, 1e-300)), ("add", (K, 0.0)),
        ("masked_fill", (HALF, X > 0, 65504)), ("tril", (X, -2)), ("empty_strided", ((2,), (1,))),
        ("select_scatter", (X, X[0], 0, 1)), ("binary_cross_entropy", (X, X, X[0], 1)),
    )  # fmt: skip
    for op, args in taken:
        assert not is_refused(op, args, {}), (op, args)


@pytest.mark.parametrize(
    "fn",
    (
        lambda x, n: torch.cdist(x, x + 1, p=n),
        lambda x, n: torch.pdist(x, p=n),
        lambda x, n: torch.addmv(x[0, :2] * math.nan, x, x[0], beta=n),
        lambda x, n: torch.addr(x * math.nan, x[0, :2], x[0], beta=n),
    ),
)
def test_a_number_that_rounds_to_0(fn: Callable[..., Any]) -> None:
    """As a power, or a scale, it is 0 in eager."""
    torch.testing.assert_close(torch.compile(fn, backend="lenz")(X, 1e-300), fn(X, 1e-300))


@pytest.mark.parametrize("n", (2**63 - 1, 2**63 - 3, -(2**63)))
def test_a_diagonal_beyond_all_positions(n: int) -> None:
    """The row of such an element does not fit 64 bits."""
    fn = lambda x: (x.tril(n), x.triu(n))
    torch.testing.assert_close(torch.compile(fn, backend="lenz")(X), fn(X))


@pytest.mark.parametrize(
    "fn",
    (
        lambda x, n: torch.full((3,), n * 100, dtype=x.dtype),
        lambda x, n: torch.where(x > 1, x, n),
        lambda x, n: x.masked_fill(x > 1, n),
        lambda x, n: x.clamp(n),
        lambda x, n: torch.add(x, x, alpha=n),
        lambda x, n: x.clone().fill_(torch.tensor(n).item()),
    ),
)
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_size_that_does_not_fit_raises(fn: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    run = torch.compile(fn, backend="lenz", dynamic=True)
    for n in (1, 2):
        torch.testing.assert_close(run(BYTE, n), fn(BYTE, n))
    with pytest.raises(RuntimeError, match="without overflow"):
        run(BYTE, 300)


def test_numbers_do_not_widen_the_blocks_of_a_diagonal() -> None:
    """Eager ignores the type of a number beside matrices; that of a 1 x 1 matrix would count."""
    x = torch.ones(2, 2), torch.tensor(2.0, dtype=torch.float64)
    got = torch.compile(torch.block_diag, backend="lenz")(*x)
    torch.testing.assert_close(got, torch.block_diag(*x), rtol=0, atol=0)
