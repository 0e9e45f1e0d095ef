"""Reads at computed positions: values, negative positions, errors for what lies outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lower.harness import check

aten = torch.ops.aten
X = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)
I = torch.tensor([[1, 0, -1], [0, 1, 1]])  # noqa: E741 - positions
J = torch.tensor([2, -1, 0])
Fn = Callable[..., Any]

INDEX: dict[str, Fn] = {
    "first": lambda x, i, j: x[i],
    "last": lambda x, i, j: x[:, :, j],
    "two": lambda x, i, j: x[i, j],
    "two_last": lambda x, i, j: x[:, j, i],
    "apart": lambda x, i, j: x[i, :, j],
    "all": lambda x, i, j: x[i, j, i],
    "gap_in_front": lambda x, i, j: x[None, i, :, j],
    "scalar": lambda x, i, j: aten.index(x, [i[0, 0]]),
    "scalar_and_list": lambda x, i, j: aten.index(x, [i[0, 0], None, j]),
    "broadcast": lambda x, i, j: x[i[:, :1], j],
    "list": lambda x, i, j: x[[1, 0]],
    "slices": lambda x, i, j: x[1:, j, 1::2],
    "int32": lambda x, i, j: x[i.int()],
    "computed": lambda x, i, j: (x * 2)[(i + 0).abs(), j + 0] + 1,
    "empty": lambda x, i, j: x[i[:0]],
    "unsafe": lambda x, i, j: aten._unsafe_index(x, [None, j]),
    "take": lambda x, i, j: torch.take(x, i * 7),
    "take_along_dim": lambda x, i, j: x.take_along_dim(j.abs()[None, :, None], 2),
    "index_select": lambda x, i, j: x.index_select(1, j.abs()),
    "index_select_scalar": lambda x, i, j: x.index_select(2, j[0]),
    "gather": lambda x, i, j: x.gather(1, (i.abs()[:, :, None] + 0)),
    "gather_part": lambda x, i, j: x.gather(2, i.abs()[:1, :2, None].expand(1, 2, 3)),
    "embedding": lambda x, i, j: F.embedding(i.abs(), x[0]),
    "embedding_scalar": lambda x, i, j: F.embedding(j[0], x[0]),
    "embedding_padding": lambda x, i, j: F.embedding(i.abs(), x[0], padding_idx=0),
}


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", INDEX)
def test_index(name: str, dynamic: bool) -> None:
    check(INDEX[name], X, I, J, exact=True, dynamic=dynamic)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.int8, torch.bool, torch.uint32), ids=str)
def test_index_of_types(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    check(lambda x, i: x[i], x, I, exact=True)
    check(lambda x, i: F.embedding(i, x[0]), x, I.abs(), exact=True)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.gather(0, i[:, None, None]),
        lambda x, i: F.embedding(i, x[:, :, 0]),
        lambda x, i: torch.take(x, i * 100),
    ],
)
def test_a_position_outside_is_an_error(fn: Fn) -> None:
    with pytest.raises(Exception, match=r"out of (range|bounds)"):
        check(fn, X, torch.tensor([0, 2]))
    with pytest.raises(Exception, match=r"out of (range|bounds)"):
        check(fn, X, torch.tensor([-3, 0]))


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_masked_fill_and_where_through_index(dynamic: bool) -> None:
    def causal(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        mask = torch.arange(n)[:, None] >= torch.arange(x.shape[2])
        return x.masked_fill(~mask, float("-inf"))

    check(causal, X, dynamic=dynamic)
