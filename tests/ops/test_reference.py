"""The references that are our own, against exact arithmetic and against torch where it is right."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from lenz.ir.dtype import U16, U32, U64, DType
from lenz.ir.op import op_named
from lenz.ops.reference import fma


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fma_rounds_once(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    x, y = (torch.randn(3000, generator=g, dtype=dtype) for _ in range(2))
    # Sums that nearly cancel, and sums near a tie, tell one rounding from two.
    z = torch.where(torch.rand(3000, generator=g) < 0.5, -(x * y), 2.0**25 * x * (1 + 2.0**-20))
    got = fma(x, y, z)
    step = np.float32 if dtype is torch.float32 else np.float64
    for a, b, c, r in zip(x.tolist(), y.tolist(), z.tolist(), got.tolist(), strict=True):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        error = abs(Fraction(r) - exact)
        for other in (np.nextafter(step(r), step(np.inf)), np.nextafter(step(r), step(-np.inf))):
            assert error <= abs(Fraction(float(other)) - exact)


def test_fma_keeps_special_values() -> None:
    x = torch.tensor([float("inf"), 0.0, float("nan"), -0.0, 3e38])
    y = torch.tensor([0.0, float("inf"), 1.0, 1.0, 3e38])
    z = torch.tensor([1.0, 1.0, 1.0, -0.0, 0.0])
    got = fma(x, y, z)
    assert got[:3].isnan().all() and got[3] == 0 and got[3].signbit() and got[4] == float("inf")


@pytest.mark.parametrize("name", ["fmod", "remainder", "div_floor", "div_trunc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_division_agrees_with_torch(name: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(5000, generator=g, dtype=dtype) * 50
    y = torch.randn(5000, generator=g, dtype=dtype) * 5
    x[:2000], y[:2000] = x[:2000].round(), y[:2000].round()
    forms: dict[str, Callable[..., Any]] = {
        "fmod": torch.fmod,
        "remainder": torch.remainder,
        "div_floor": torch.floor_divide,
        "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    }
    eager = op_named(name).eager
    assert eager is not None
    torch.testing.assert_close(eager(x, y), forms[name](x, y), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [U16, U32, U64], ids=str)
def test_unsigned_arithmetic_is_pythons_modulo_a_power_of_two(dtype: DType) -> None:
    top = 2**dtype.bits - 1
    values = [0, 1, 2, 3, 100, top // 2, top // 2 + 1, top - 1, top]
    pairs = [(a, b) for a in values for b in values]
    x = torch.tensor([a for a, _ in pairs], dtype=dtype.torch)
    y = torch.tensor([b for _, b in pairs], dtype=dtype.torch)
    exact: dict[str, Callable[[int, int], int]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "minimum": min,
        "maximum": max,
        "and": lambda a, b: a & b,
        "div_floor": lambda a, b: a // (b or 1),
        "remainder": lambda a, b: a % (b or 1),
        "shift_left": lambda a, b: a << b if b < dtype.bits else 0,
        "shift_right": lambda a, b: a >> b,
        "lt": lambda a, b: a < b,
    }
    for name, f in exact.items():
        eager = op_named(name).eager
        assert eager is not None
        assert [int(v) for v in eager(x, y).tolist()] == [f(a, b) & top for a, b in pairs], name
