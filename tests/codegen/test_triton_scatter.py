"""Scans and scatters on GPUs: in Triton's interpreter against the oracle, and as cubins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
from gpu_oracle import assert_triton, cubins, scheduled

from lenz.ir.graph import Extern

X, S = torch.randn(33, 70), torch.randn(50, 70)
J = torch.randint(0, 33, (50,))
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "cumsum": (lambda x: x.cumsum(-1) * 2, (X,)),
    "cumsum_columns": (lambda x: x.cumsum(0), (X,)),
    "cumprod_half": (lambda x: x.cumprod(-1), (torch.rand(5, 60).bfloat16() + 0.5,)),
    "cummax": (lambda x: x.cummax(-1), (X,)),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), (X,)),
    "cumsum_int": (lambda x: (x > 0).long().cumsum(-1), (X,)),
    "reverse": (lambda x: x.flip(-1).cumsum(-1).flip(-1), (X,)),
    "scatter_add": (lambda x, s, j: x.scatter_add(0, j[:, None].expand(50, 70), s), (X, S, J)),
    "accumulate": (lambda x, s, j: x.index_put((j,), s, accumulate=True), (X, S, J)),
    "amax": (
        lambda x, s, j: x.scatter_reduce(0, j[:, None].expand(50, 70), s, "amax"),
        (X, S, J),
    ),
    "embedding": (
        lambda g, j: torch.ops.aten.embedding_dense_backward(g, j, 100, -1, False),
        (S, J),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_scan_or_scatter_is_a_kernel_and_right(name: str) -> None:
    fn, args = CASES[name]
    s = assert_triton(harness.lowered(fn, args))
    assert not [x.op for x in s.steps if isinstance(x, Extern)]
    assert all(b.spills == 0 for b in cubins(s))


def test_the_rows_of_a_scan_are_held_by_one_program() -> None:
    from gpu_oracle import on_gpu

    s = scheduled(on_gpu(harness.lowered(lambda x: x.cumsum(-1), [torch.randn(4, 3000)])))
    assert [b.spills for b in cubins(s)] == [0]
