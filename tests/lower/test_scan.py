"""Running values along a dimension: values, types, NaN, empty and short rows, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lenz.ir.graph import Graph, Scan
from tests.lower.harness import check

X = torch.tensor([[1.5, -2.0, 0.0, 3.0, 3.0], [float("-inf"), 2.0, 2.0, -1.0, 0.5]])
N = torch.tensor([[1.0, float("nan"), 5.0, float("nan"), 2.0]])
Fn = Callable[..., Any]

SCANS: dict[str, Fn] = {
    "cumsum": lambda x: x.cumsum(1),
    "cumsum_columns": lambda x: x.cumsum(0),
    "cumsum_back": lambda x: x.cumsum(-1) + 1,
    "cumsum_double": lambda x: x.cumsum(1, dtype=torch.float64),
    "cumsum_of_int": lambda x: x.nan_to_num(neginf=0).int().cumsum(1),
    "cumsum_of_bool": lambda x: (x > 0).cumsum(1),
    "cumsum_short": lambda x: x.to(torch.int8).cumsum(1, dtype=torch.int16),
    "cumsum_to_float": lambda x: (x > 0).cumsum(1, dtype=torch.float32),
    "cumsum_one": lambda x: x[:, :1].cumsum(1),
    "cumsum_none": lambda x: x[:, :0].cumsum(1),
    "cumsum_scalar": lambda x: x[0, 0].cumsum(0),
    "cumprod": lambda x: x.cumprod(1),
    "cumprod_int": lambda x: (x > 0).int().cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "logcumsumexp_columns": lambda x: x.logcumsumexp(0),
    "cummax": lambda x: tuple(x.cummax(1)),
    "cummax_columns": lambda x: tuple(x.cummax(0)),
    "cummax_bool": lambda x: tuple((x > 2).cummax(1)),
    "cummax_scalar": lambda x: tuple(x[0, 0].cummax(0)),
    "cummin": lambda x: tuple(x.cummin(1)),
    "cummin_int": lambda x: tuple((x > 0).int().cummin(1)),
    "of_the_end": lambda x: x.flip(1).cumsum(1).flip(1),
    "both_ways": lambda x: (c := x.cumsum(1), c.flip(1), c.flip(0)),
    "transposed": lambda x: x.t().cumsum(0).t() * 2,
}


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", SCANS)
def test_scan(name: str, dynamic: bool) -> None:
    check(SCANS[name], X, dynamic=dynamic)


@pytest.mark.parametrize(
    "dtype", (torch.bfloat16, torch.float16, torch.float64, torch.int64), ids=str
)
def test_types(dtype: torch.dtype) -> None:
    x = (X.nan_to_num(neginf=-9) * 2).to(dtype)
    check(lambda x: (x.cumsum(1), x.cumprod(1), *x.cummax(1), *x.cummin(0)), x)


def test_nan_stays_and_its_last_place_counts() -> None:
    check(lambda x: (*x.cummax(1), *x.cummin(1), x.cumsum(1), x.logcumsumexp(1)), N)


def test_infinities_do_not_become_nan() -> None:
    inf = float("inf")
    x = torch.tensor([[-inf, -inf, 1.0, -inf], [inf, inf, 1.0, -inf], [-inf, inf, inf, 0.0]])
    check(lambda x: x.logcumsumexp(1), x)


def scans(g: Graph) -> list[Scan]:
    return [n for n in g.nodes if isinstance(n, Scan)]


def test_a_flipped_scan_runs_from_the_end() -> None:
    g = check(lambda x: x.flip(1).cumsum(1).flip(1), X)
    assert [n.reverse for n in scans(g)] == [False, True], "the second is the one that is used"


def test_a_flip_of_other_dimensions_is_a_copy() -> None:
    g = check(lambda x: x.cumsum(1).flip((0, 1)), X)
    assert [n.reverse for n in scans(g)] == [False]


@pytest.mark.parametrize("rows", (1, 3))
def test_sums_begin_with_zero(rows: int) -> None:
    """1 / result tells the signs of zeros; the interpreter has eager's as well."""
    x = torch.full((rows, 5), -0.0)
    x[:, 3] = 1
    check(lambda x: (1 / x.cumsum(0), 1 / x.cumsum(1), 1 / x[:, :1].cumsum(1)), x, exact=True)
    check(lambda x: (1 / x.cumprod(1), 1 / x.cummax(1)[0], 1 / x[0, 0].cumsum(0)), x, exact=True)
    check(lambda x: (1 / x[:, :1].logcumsumexp(1), 1 / x.logcumsumexp(1)), x)
