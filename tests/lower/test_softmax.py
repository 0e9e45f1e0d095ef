"""Softmax and log-softmax against eager, by the interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from tests.lower.harness import check, lowered

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ROWS = torch.tensor(
    [
        [1e4, 1e4 - 1, 0.0],
        [-math.inf, -math.inf, -math.inf],
        [math.inf, 1.0, 2.0],
        [-math.inf, 1.0, 2.0],
        [math.nan, 1.0, 2.0],
    ]
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Every dimension, strided inputs, 0-d and empty tensors."""
    fn = getattr(torch, name)
    for shape in ((), (1,), (7,), (3, 5), (2, 3, 4), (3, 0), (0, 3)):
        x = torch.randn(shape).to(dtype)
        for dim in range(-len(shape), max(len(shape), 1)):
            check(lambda x: fn(x, dim), x)
    check(lambda x: fn(x, 1), torch.randn(5, 4).to(dtype).t())
    check(lambda x: fn(x, -1), torch.randn(3, 8).to(dtype)[:, ::2])
    check(lambda x: fn(x, 1), ROWS.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_backward_data(dtype: torch.dtype) -> None:
    """Gradients from the saved results."""
    for shape, dim in (((), 0), ((7,), 0), ((3, 5), 1), ((2, 3, 4), -2)):
        g, x = torch.randn(shape).to(dtype), torch.randn(shape)
        y, log_y = x.softmax(dim).to(dtype), x.log_softmax(dim).to(dtype)
        check(lambda g, y: aten._softmax_backward_data(g, y, dim, g.dtype), g, y)
        check(lambda g, y: aten._log_softmax_backward_data(g, y, dim, g.dtype), g, log_y)


def test_safe_softmax() -> None:
    """Zeros where all of a row is masked out; NaN stays."""
    check(lambda x: aten._safe_softmax(x, -1), ROWS)
    check(lambda x: aten._safe_softmax(x, 0), torch.randn(4, 5))
    check(lambda x: aten._safe_softmax(x, -1, torch.float64), ROWS)
    check(lambda x: aten._safe_softmax(x, -1), ROWS.bfloat16())


def test_dtype_and_symbolic_sizes() -> None:
    """The dtype argument; sizes that vary."""
    check(lambda x: torch.softmax(x, -1, dtype=torch.float32), torch.randn(3, 4).bfloat16())
    check(lambda x: torch.softmax(x, 0, dtype=torch.float32), torch.randint(0, 5, (3, 4)))
    check(lambda x: (torch.softmax(x, 1), torch.log_softmax(x, 0)), torch.randn(3, 4), dynamic=True)


def test_number_of_loops() -> None:
    """Maximum, sum, result: the exponential is not stored."""
    assert len(lowered(lambda x: x.softmax(-1), (torch.randn(3, 4),)).nodes) == 3
