"""Places in sorted sequences and histograms against eager, by the interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from tests.lower.harness import check, evaluated

EDGES = torch.tensor([-2.0, -0.5, -0.5, 0.0, 1.0, 1.0, 1.0, 3.5, 9.0])
X = torch.cat([torch.linspace(-3, 10, 40), EDGES, torch.tensor([math.nan, math.inf, -math.inf])])


@pytest.mark.parametrize("right", (False, True), ids=("left", "right"))
@pytest.mark.parametrize("n", (1, 2, 7, 8, 9))
def test_bucketize(n: int, right: bool) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8):
        x = X.nan_to_num(posinf=99, neginf=-99).to(dtype) if dtype.is_signed else X
        check(lambda x, e: torch.bucketize(x, e, right=right), x, EDGES[:n].to(dtype))
    check(lambda x, e: torch.bucketize(x, e, right=right, out_int32=True), X, EDGES[:n])
    check(lambda e: torch.bucketize(0.5, e, right=right), EDGES[:n])
    check(lambda x, e: torch.bucketize(x, e[:0], right=right), X, EDGES)


def test_of_other_types_out_of_order_and_dynamic() -> None:
    """Types are promoted; a sequence out of order takes eager's own steps; NaN in the sequence."""
    check(lambda x, e: torch.bucketize(x, e), X.int(), EDGES)
    check(lambda x, e: torch.searchsorted(e.flip(0), x), X, EDGES)
    check(lambda x, e: torch.searchsorted(e, x), X, X)
    check(lambda x, e: torch.searchsorted(e, x) + 1, X, EDGES, dynamic=True, native=False)


def test_what_is_compared_with_halves_is_rounded_to_them() -> None:
    """0.1 lies above the nearest half, and 257 is 256 in bf16."""
    edges = torch.tensor([0.0, 0.1, 0.2]).half()
    check(lambda e: (torch.searchsorted(e, 0.1), torch.searchsorted(e, 0.1, right=True)), edges)
    check(lambda e: torch.bucketize(torch.tensor(0.1), e), edges)
    check(torch.bucketize, torch.tensor([255, 256, 257]), torch.tensor([256, 258]).bfloat16())


@pytest.mark.parametrize("side", ("left", "right"))
def test_searchsorted_rows(side: str) -> None:
    rows = torch.stack([EDGES, EDGES * 2, EDGES - 1])
    x = torch.stack([X, X.flip(0), X])
    check(lambda e, x: torch.searchsorted(e, x, side=side), rows, x)
    order = torch.tensor([[3, 1, 2, 0, 5, 4, 8, 7, 6]] * 3)
    shuffled = torch.empty_like(rows).scatter(1, order, rows)
    check(lambda e, x, o: torch.searchsorted(e, x, side=side, sorter=o), shuffled, x, order)


def test_histc() -> None:
    x = torch.cat([X, torch.tensor([-2.0, 3.5, 3.4999])])
    for bins in (1, 5, 100):
        check(lambda x, b=bins: torch.histc(x, b, -2, 3.5), x)
        check(lambda x, b=bins: torch.histc(x, b, -2, 3.5), x.double().view(1, -1))
    for y in (x[x.isfinite()], torch.full((3,), 2.0), torch.tensor(1.5)):
        for dynamic in (False, True):
            check(lambda x: torch.histc(x, 7), y, dynamic=dynamic)
    check(lambda x: (torch.histc(x, 3), torch.histc(x, 3, 1, 2)), x[:0])


def test_histc_of_what_is_not_finite() -> None:
    for wrong in (math.nan, math.inf, -math.inf):
        with pytest.raises(RuntimeError, match="not finite"):
            evaluated(lambda x: torch.histc(x, 3), torch.tensor([1.0, wrong, 2.0]))
