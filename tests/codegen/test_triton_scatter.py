"""Scans and scatters on GPUs: in Triton's interpreter against the oracle, and as cubins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.ir.graph import Extern, buffers_of
from lenz.ir.interp import interp
from lenz.sym import Int
from tests.gpu_oracle import TINY, assert_function, cubins, kinds_of, texts_of

G = torch.Generator().manual_seed(0)
X, S = torch.randn(33, 70, generator=G), torch.randn(50, 70, generator=G)
J = torch.randint(0, 33, (50,), generator=G)
COUNTS = torch.arange(100) % 7
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "cumsum": (lambda x: x.cumsum(-1) * 2, (X,)),
    "cumsum_columns": (lambda x: x.cumsum(0), (X,)),
    "cumsum of one": (lambda x: x.cumsum(0) + 1, (X[:, :1].flatten()[:1],)),
    "cumsum of none": (lambda x: (x.cumsum(0), x.cumsum(1)), (X[:0],)),
    "cumprod_half": (lambda x: x.cumprod(-1), (torch.rand(5, 60).bfloat16() + 0.5,)),
    "cummax": (lambda x: x.cummax(-1), (X,)),
    "cummax of ties and NaN": (
        lambda x: (x.cummax(-1), x.cummin(0)),
        (torch.where(X > 1.5, torch.nan, X).round(),),
    ),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), (X,)),
    "cumsum_int": (lambda x: (x > 0).long().cumsum(-1), (X,)),
    "reverse": (lambda x: x.flip(-1).cumsum(-1).flip(-1), (X,)),
    "scatter_add": (lambda x, s, j: x.scatter_add(0, j[:, None].expand(50, 70), s), (X, S, J)),
    "scatter": (lambda x, s, j: x.scatter(0, j[:, None].expand(50, 70), s), (X, S, J)),
    "accumulate": (lambda x, s, j: x.index_put((j,), s, accumulate=True), (X, S, J)),
    "index_copy": (lambda x, s, j: x.index_copy(0, j[:9] % 9 * 2, s[:9]), (X, S, J)),
    "updates within rows": (
        lambda x, i: x.scatter_add(2, i, x.exp()),
        (X.view(11, 30, 7), torch.randint(0, 7, (11, 30, 7), generator=G)),
    ),
    "one update": (lambda x, i: x.scatter(0, i, 2.0), (X[0], J[0])),
    "few updates within rows": (
        lambda x, i: x.scatter(1, i[:, :5], x[3:, 9:]),
        (X, X[3:].argsort(1)),
    ),
    "amax": (lambda x, s, j: x.scatter_reduce(0, j[:, None].expand(50, 70), s, "amax"), (X, S, J)),
    "mean of halves": (
        lambda x, s, j: x.scatter_reduce(0, j[:, None].expand(50, 70), s, "mean"),
        (X.bfloat16(), S.bfloat16(), J),
    ),
    "embedding": (
        lambda g, j: torch.ops.aten.embedding_dense_backward(g, j, 100, -1, False),
        (S, J),
    ),
    "embedding of few halves": (
        lambda g, j: torch.ops.aten.embedding_dense_backward(g, j.view(5, 10), 100, 3, False),
        (S.bfloat16().view(5, 10, 70), J),
    ),
    "embedding of many halves": (
        lambda g, j: torch.ops.aten.embedding_dense_backward(g, j, 40, -1, False),
        (S.half(), J),
    ),
    "counts": (lambda j: j.new_zeros(7).index_add(0, j, torch.ones_like(j)), (COUNTS,)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_a_scan_or_scatter_is_a_kernel_and_right(name: str) -> None:
    fn, args = CASES[name]
    s = assert_function(fn, *args)
    assert not [x.op for x in s.steps if isinstance(x, Extern)]
    assert all(b.spills == 0 for b in cubins(s))
    assert_function(fn, *args, tiles=TINY)


def test_the_rows_of_a_scan_are_held_by_one_program() -> None:
    s = assert_function(lambda x: x.cumsum(-1), torch.ones(4, 3000))
    assert kinds_of(s) == ["scan"] and [b.spills for b in cubins(s)] == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_small_table_has_no_updates(dtype: torch.dtype) -> None:
    """All lookups of a row would wait for each other: relative positions have 32 rows."""
    places = torch.randint(0, 32, (64, 20))
    gradient = torch.randn(64, 20, 8).to(dtype)
    for padding, kept in ((-1, places >= 0), (3, places != 3)):

        def table(g: torch.Tensor, j: torch.Tensor, padding: int = padding) -> torch.Tensor:
            return torch.ops.aten.embedding_dense_backward(g, j, 32, padding, False)

        s = assert_function(table, gradient, places)
        assert {*kinds_of(s)} == {"outer_reduction"}
        want = torch.zeros(32, 8).index_add(0, places[kept], gradient[kept].float())
        (got,) = interp(s.graph, [gradient, places]).outputs
        torch.testing.assert_close(got, want.to(dtype), atol=1e-4, rtol=0.01)


def test_updates_meet_at_one_element() -> None:
    """Neither the place nor the value depends on the update: it happens 1500 times all the same."""

    def fn(x: Tensor, j: Tensor, one: Tensor) -> Tensor:
        return x.index_add(0, j * 0, one.expand(1500))

    s = assert_function(fn, torch.zeros(3), torch.arange(1500), torch.ones(1))
    assert kinds_of(s)[-1] == "scatter" and "tl.atomic_add" in texts_of(s)[-1]


@pytest.mark.parametrize("kind", ["amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_nan_wins_whatever_its_sign(kind: str, dtype: torch.dtype) -> None:
    """Triton compares the bits of floats as integers, where a NaN may be less than all numbers."""
    x, s, j = X[:5].clone().to(dtype), S.clone().to(dtype), J[:, None].expand(50, 70) % 5
    x[0], x[1], s[3], s[8] = torch.nan, -torch.tensor(torch.nan), torch.nan, -torch.inf
    s[12] = -torch.tensor(torch.nan)
    for include in (True, False):
        assert_function(
            lambda x, s, j: x.scatter_reduce(0, j, s, kind, include_self=include), x, s, j
        )


def test_sums_of_few_lookups_are_no_larger_than_the_lookups() -> None:
    def fn(g: Tensor, j: Tensor) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(g, j, 1000, -1, False)

    g = assert_function(fn, S.bfloat16(), J).graph
    sums = [b for b in buffers_of(g).values() if b.dtype.name == "f32"]
    assert sums and {b.shape[0] for b in sums} == {Int(51)}
