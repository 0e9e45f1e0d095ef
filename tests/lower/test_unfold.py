"""Windows as columns and back, and distances of rows, against eager, by the interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lenz
from tests.lower.harness import check

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
# kernel, dilation, padding, stride
FORMS: list[tuple[Any, Any, Any, Any]] = [
    (2, 1, 0, 2), (3, 1, 1, 1), ((3, 2), (2, 1), (2, 1), (1, 2)), (2, 3, 1, 2), ((1, 4), 1, 0, 3),
    ((2, 8), 1, 0, (2, 8)),
]  # fmt: skip


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_unfold_and_fold(form: tuple[Any, Any, Any, Any]) -> None:
    for shape in ((2, 3, 8, 9), (3, 8, 9)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shape).to(dtype)
            check(lambda x: F.unfold(x, *form), x)
            columns = torch.randn(F.unfold(x, *form).shape).to(dtype)
            check(lambda c: F.fold(c, (8, 9), *form), columns)


def test_unfold_of_symbolic_sizes() -> None:
    x = torch.randn(2, 3, 8, 9)
    check(lambda x: F.unfold(x, 3, padding=1, stride=2), x, dynamic=True)
    check(lambda x: F.unfold(x, 7, padding=3), x)


@pytest.mark.parametrize("p", (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf))
def test_distances_of_rows_with_nan_and_infinity(p: float) -> None:
    x, y = torch.randn(5, 4), torch.randn(6, 4)
    x[0, 1], x[1, 3], x[2, 0], y[1, 2], y[2, 0] = NAN, NAN, INF, -INF, INF
    check(lambda x, y: torch.cdist(x, y, p), x, y, native=p != 2)
    check(lambda x: torch.nn.functional.pdist(x, p), x)
    given = torch.randn(5, 6), x, y
    check(lambda g, x, y: aten._cdist_backward(g, x, y, p, aten._cdist_forward(x, y, p, 2)), *given)


@pytest.mark.parametrize("p", (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, math.inf))
def test_distances(p: float) -> None:
    """Forward and backward; equal rows, of which some elements differ in others."""
    x, y = torch.randn(2, 5, 4), torch.randn(2, 6, 4)
    y[:, 1] = x[:, 2]
    y[:, 2, 1:] = x[:, 0, 1:]
    for dtype in (torch.float32, torch.float64):
        a, c = x.to(dtype), y.to(dtype)
        forward = lambda a, c: aten._cdist_forward(a, c, p, 2)
        check(forward, a, c)
        given = (torch.randn(2, 5, 6, dtype=dtype), a, c)
        check(lambda g, a, c: aten._cdist_backward(g, a, c, p, forward(a, c)), *given)
    check(lambda x, y: torch.cdist(x, y, p), x[:1], y, native=p != 2)
    check(lambda x, y: torch.cdist(x[:, :, :0], y[:, :, :0], p), x, y, native=False)


@pytest.mark.parametrize("p", (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf))
def test_distances_of_rows_of_one_matrix(p: float) -> None:
    """All pairs i < j in order, with equal rows among them; one row, and none."""
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(3))
    x[4] = x[1]
    for rows in (7, 2, 1, 0):
        dy = torch.linspace(-1, 2, rows * (rows - 1) // 2)
        for dynamic in (False, True) if rows > 2 else (False,):
            check(lambda x: aten._pdist_forward(x, p), x[:rows], dynamic=dynamic)
            if rows > 1:  # of one row, eager reads what is not there
                check(
                    lambda dy, x: aten._pdist_backward(dy, x, p, aten._pdist_forward(x, p)),
                    dy, x[:rows], dynamic=dynamic,
                )  # fmt: skip


def test_the_windows_of_istft_are_one_scatter() -> None:
    """All rows share the windows of the envelope; each element of a window was an op."""
    window = torch.hann_window(64)

    def back(x: torch.Tensor) -> torch.Tensor:
        s = torch.stft(x, 64, 16, window=window, return_complex=True)
        return torch.istft(s, 64, 16, window=window, length=x.shape[-1])

    x = torch.randn(2, 500)
    report = lenz.explain(back)(x)
    torch.testing.assert_close(report.result, back(x))
    assert sum(report.graphs[0].calls.values()) < 40
