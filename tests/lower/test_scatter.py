"""Writes at computed positions: values, order of repeats, negative positions, errors, types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lower.harness import check

aten = torch.ops.aten
X = torch.arange(5 * 4, dtype=torch.float32).reshape(5, 4) - 7
V = torch.tensor([[0.5, -1.0, 2.0, 3.0], [4.0, 2.5, -6.0, 7.0], [1.0, 1.0, 0.0, 2.0]])
I = torch.tensor([[0, 2, 1, 4], [3, 2, 0, 4], [0, 0, 1, 1]])  # noqa: E741 - positions
K = torch.tensor([3, 0, 3])
Fn = Callable[..., Any]

SCATTERS: dict[str, Fn] = {
    "scatter": lambda x, v, i, k: x.scatter(0, i[:2, :3] + 0, v),
    "scatter_repeats": lambda x, v, i, k: x.scatter(1, i[:, :3].clamp(max=3), v),
    "scatter_value": lambda x, v, i, k: x.scatter(0, i, 2.5),
    "scatter_value_of_ints": lambda x, v, i, k: x.long().scatter(0, i, 2),
    "scatter_none": lambda x, v, i, k: x.scatter(0, i[:0], v),
    "scatter_plus": lambda x, v, i, k: x.scatter(0, i, v, reduce="add"),
    "scatter_times": lambda x, v, i, k: x.scatter(0, i, 2.0, reduce="multiply"),
    "scatter_add": lambda x, v, i, k: x.scatter_add(0, i, v),
    "scatter_add_rows": lambda x, v, i, k: x.scatter_add(0, k[:, None].expand(3, 4), v) * 2,
    "scatter_add_last": lambda x, v, i, k: (x + 1).scatter_add(1, i.remainder(4), v),
    "scatter_add_transposed": lambda x, v, i, k: x.t().scatter_add(1, i.t(), v.t()),
    "sum": lambda x, v, i, k: x.scatter_reduce(0, i, v, "sum"),
    "prod": lambda x, v, i, k: x.scatter_reduce(0, i, v, "prod", include_self=False),
    "mean": lambda x, v, i, k: x.scatter_reduce(0, i, v, "mean"),
    "mean_alone": lambda x, v, i, k: x.scatter_reduce(0, i, v, "mean", include_self=False),
    "amax": lambda x, v, i, k: x.scatter_reduce(0, i, v, "amax"),
    "amin_alone": lambda x, v, i, k: x.scatter_reduce(0, i, v, "amin", include_self=False),
    "amax_of_ints": lambda x, v, i, k: x.int().scatter_reduce(
        0, i, v.int(), "amax", include_self=False
    ),
    "put": lambda x, v, i, k: x.index_put((k[:2],), v[:2]),
    "put_one_value": lambda x, v, i, k: x.index_put((k - 5, k), v[0, 0]),
    "put_apart": lambda x, v, i, k: aten.index_put(x[None], [k[1:2] * 0, None, k[:2]], v[0, :1]),
    "put_column": lambda x, v, i, k: aten.index_put(x, [None, k], x[:, :3]),
    "put_add": lambda x, v, i, k: x.index_put((k,), v, accumulate=True),
    "put_add_pairs": lambda x, v, i, k: x.index_put((k[:, None], k), v[:, :3], accumulate=True),
    "put_add_bool": lambda x, v, i, k: (x > 2).index_put((k,), v > 2, accumulate=True),
    "put_masked": lambda x, v, i, k: x.index_put((x > 2,), v[0, 0]),
    "put_masked_rows": lambda x, v, i, k: x.index_put((x[:, 0] > 2,), v[0, 0]),
    "put_flat": lambda x, v, i, k: x.put(i - 20, v),
    "put_flat_add": lambda x, v, i, k: x.put(i, v, accumulate=True),
    "add_rows": lambda x, v, i, k: x.index_add(0, k, v),
    "add_columns": lambda x, v, i, k: x.index_add(1, k, x[:, :3], alpha=-2),
    "add_row": lambda x, v, i, k: x.index_add(0, k[0], v[:1]),
    "copy_rows": lambda x, v, i, k: x.index_copy(0, k[:2], v[:2]),
    "fill_rows": lambda x, v, i, k: x.index_fill(0, k - 5, 1.5),
    "fill_by_a_tensor": lambda x, v, i, k: x.index_fill(1, k, v[1, 1]),
    "reduce_rows": lambda x, v, i, k: x.index_reduce(0, k, v, "amin", include_self=False),
    "masked": lambda x, v, i, k: x.masked_scatter(x > 4, v),
    "masked_broadcast": lambda x, v, i, k: x.masked_scatter(x[:1] > -7, x * 2),
    "put_masked_slices": lambda x, v, i, k: (
        x.index_put((x[:, 0] > 2,), v[0]), aten.index_put(x, [None, x[0] > -6], v[2, :1]),
    ),
    "add_masked": lambda x, v, i, k: x.index_put((x > 2,), v[0, 0], accumulate=True),
    "add_masked_slices": lambda x, v, i, k: (
        aten.index_put(x[None], [None, x[:, 0] > 2], v[:1, 0], accumulate=True),
        (x > 0).index_put((x > 2,), v[0, 0] > 2, accumulate=True),
    ),
    "put_nowhere": lambda x, v, i, k: (x[:0].put(i[:0], v[:0]), x.take(i[:0]), x[:0].take(i[:0])),
    "mean_of_ints": lambda x, v, i, k: x.int().scatter_reduce(0, i, v.int(), "mean"),
    "masked_backward": lambda x, v, i, k: (
        aten.masked_scatter_backward(x, x > 2, [3, 4]), aten.masked_scatter_backward(x, x > 2, [20])
    ),
    "places": lambda x, v, i, k: (
        torch.nonzero_static(x > 2, size=3), torch.nonzero_static(v - v[1, 1], size=40),
        torch.nonzero_static(x[0, 0], size=2), torch.nonzero_static(x[:0], size=2, fill_value=5),
        torch.nonzero_static(x[None] == 3, size=0),
    ),
    "masked_put_add": lambda x, v, i, k: aten._unsafe_masked_index_put_accumulate(
        x, v > 0, [k - 3, None], v
    ),
    "rows_of_a_table": lambda x, v, i, k: aten.embedding_dense_backward(v, k, 5, -1, False),
    "but_the_padding": lambda x, v, i, k: aten.embedding_dense_backward(v, k, 5, 3, False),
    "one_after_the_other": lambda x, v, i, k: x.index_add(0, k, v).index_fill(0, k[:1], 0.0),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", SCATTERS)
def test_scatter(name: str, dynamic: bool) -> None:
    check(SCATTERS[name], X, V, I, K, dynamic=dynamic)


@pytest.mark.parametrize(
    "dtype", (torch.bfloat16, torch.float16, torch.float64, torch.int8), ids=str
)
def test_types(dtype: torch.dtype) -> None:
    def fn(x: Any, v: Any, i: Any, k: Any) -> Any:
        places = torch.nonzero_static(x - x[0, 0], size=4)
        return x.scatter(0, i[:2], v), x.scatter_add(0, i, v), x.index_copy(0, k[:2], v[:2]), places

    check(fn, X.to(dtype), V.to(dtype), I, K)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, v, k: x.scatter(0, k[:, None], 1.0),
        lambda x, v, k: x.scatter_add(0, k[:, None], v),
        lambda x, v, k: x.index_put((k,), v[0]),
        lambda x, v, k: x.index_add(0, k, v[:1]),
        lambda x, v, k: x.index_copy(0, k, v[:1]),
        lambda x, v, k: x.index_fill(0, k, 1.0),
        lambda x, v, k: x.put(k * 4, v[0, :1]),
        lambda x, v, k: aten.embedding_dense_backward(v[:1], k, 5, -1, False),
    ],
)
def test_a_position_outside_is_an_error(fn: Fn) -> None:
    for wrong in (5, -6):
        with pytest.raises(Exception, match=r"out of (range|bounds)"):
            check(fn, X, V, torch.tensor([wrong]))


def test_what_stays_eager() -> None:
    """Positions in a number are left to eager, whose errors there are of many kinds."""
    at = torch.tensor([0])
    for fn in (
        lambda x, v, k: x[0, 0].scatter(0, k[0], v[0, 0]),
        lambda x, v, k: x[0, 0].index_add(0, k[0], v[0, 0]),
        lambda x, v, k: x[0, 0].index_copy(0, k[0], v[0, 1]),
        lambda x, v, k: x[0, 0].index_fill(0, k, 3.5),
        lambda x, v, k: x[0, 0].index_select(0, k),
        lambda x, v, k: x[0, 0].index_reduce(0, k[0], v[0, 3], "mean"),
        lambda x, v, k: x[0, 0].gather(0, k[0]),
        lambda x, v, k: x[0, 0].gather(0, k),
    ):
        check(fn, X, V, at, native=False)
    check(lambda x, v: x.index_put((x > 10,), v[0, :2]), X, V, native=False)
    check(lambda x, v, k: x[:0].scatter(0, k[:0, None], 1.0), X, V, K, native=False)


def test_updates_that_all_meet_at_one_place() -> None:
    """The position does not change along the loop: lanes have no places of their own."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.scatter(1, torch.zeros_like(x, dtype=torch.long), x)

    x = torch.randn(2, 3, 4, 40).mT
    for dynamic in (False, True):
        torch._dynamo.reset()
        got = torch.compile(fn, backend="lenz", dynamic=dynamic)(x)
        torch.testing.assert_close(got, fn(x), check_stride=True)
