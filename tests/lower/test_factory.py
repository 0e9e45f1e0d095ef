"""Constants, ranges and identity matrices against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lower.harness import check

X = torch.arange(6.0).reshape(2, 3)
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.uint8, torch.bool,
)  # fmt: skip
Fn = Callable[[torch.Tensor], Any]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constants(dtype: torch.dtype) -> None:
    check(lambda x: torch.full((2, 3), 1, dtype=dtype), X)
    check(lambda x: torch.zeros(2, x.shape[0], dtype=dtype), X, dynamic=True)
    check(lambda x: torch.ones((), dtype=dtype), X)
    check(lambda x: torch.full_like(x, 1, dtype=dtype), X.t())
    check(lambda x: torch.zeros_like(x, dtype=dtype), X.t())
    check(lambda x: torch.ones_like(x, dtype=dtype), X)
    check(lambda x: x.new_full((3,), 1, dtype=dtype), X)
    check(lambda x: x.new_zeros((0, 2), dtype=dtype), X)
    check(lambda x: x.new_ones(3, dtype=dtype), X)
    check(lambda x: torch.scalar_tensor(1, dtype=dtype), X)
    check(lambda x: torch.empty(2, dtype=dtype).fill_(1), X)
    check(lambda x: torch.empty_like(x, dtype=dtype).zero_(), X)
    check(lambda x: torch.empty_strided((2, 3), (1, 2), dtype=dtype).copy_(x), X)
    check(lambda x: x.new_empty(2, dtype=dtype).zero_(), X)
    check(lambda x: torch.eye(3, dtype=dtype), X)
    check(lambda x: torch.eye(2, 4, dtype=dtype), X)


def test_constants_of_python_type() -> None:
    check(lambda x: torch.full((2,), 2.5), X)
    check(lambda x: torch.full((2,), True), X)
    check(lambda x: torch.full((2,), float("-inf"), dtype=torch.float16), X)
    check(lambda x: torch.full((2,), x.shape[0]), X, dynamic=True)
    check(lambda x: x + torch.tensor([1.0, 2.0, 3.0]), X)
    check(lambda x: torch.tensor([1.0, 2.0, 3.0]), X)


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_arange(dtype: torch.dtype) -> None:
    check(lambda x: torch.arange(7, dtype=dtype), X, exact=True)
    check(lambda x: torch.arange(2, 9, dtype=dtype), X, exact=True)
    check(lambda x: torch.arange(9, 1, -2, dtype=dtype), X, exact=True)
    check(lambda x: torch.arange(0, dtype=dtype), X, exact=True)
    if dtype.is_floating_point:
        check(lambda x: torch.arange(0.5, 9.0, 0.3, dtype=dtype), X)
        check(lambda x: torch.arange(3, 0, -0.25, dtype=dtype), X)
    else:
        check(lambda x: torch.arange(0.0, 6.0, 1.5, dtype=dtype), X)


def test_arange_of_sizes() -> None:
    check(lambda x: torch.arange(x.shape[0]), X, dynamic=True)
    check(lambda x: torch.arange(x.shape[0], x.shape[0] + 5), X, dynamic=True)
    check(lambda x: torch.arange(2.5), X)
    check(lambda x: torch.arange(0, 1, 0.1), X)


@pytest.mark.parametrize("dtype", (*DTYPES[:4], torch.int64), ids=str)
def test_linspace(dtype: torch.dtype) -> None:
    ends = (0, 1, 7), (5, -3, 8), (2, 9, 1), (2, 9, 2), (0, 1, 0), (4.3, -99, 50), (-7.8, 9.6, 40)
    for start, end, steps in ends:
        check(
            lambda x, a=start, e=end, n=steps: torch.linspace(a, e, n, dtype=x.dtype), X.to(dtype)
        )


def test_triangles_of_ranges() -> None:
    check(lambda x: torch.ones(4, 4, dtype=torch.bool).tril(), X)
    check(lambda x: torch.full((3, 3), float("-inf")).triu(1) + x[:1], X)


def test_deterministic_algorithms_fill_new_memory() -> None:
    def fn(x: torch.Tensor) -> Any:
        kinds = (torch.float32, torch.int32, torch.bool, torch.complex64)
        return [torch.empty(3, dtype=t) for t in kinds], torch.empty_like(x), x.new_empty(2, 2)

    torch.use_deterministic_algorithms(True)
    try:
        torch._dynamo.reset()
        got = torch.compile(fn, backend="lenz")(X)
        torch.testing.assert_close(got, fn(X), equal_nan=True)
    finally:
        torch.use_deterministic_algorithms(False)
