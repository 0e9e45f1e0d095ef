"""Eager references for ops that torch lacks: wide unsigned integers, exact fused multiply-add.

They run on CPU tensors and favour clarity over speed.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

Eager = Callable[..., Any]
# torch has storage for these types but hardly any arithmetic.
_BARE = (torch.uint16, torch.uint32, torch.uint64)


def with_numpy(torch_form: Eager, numpy_form: Callable[..., Any]) -> Eager:
    """`torch_form`, or `numpy_form` on arrays for unsigned types that torch cannot compute with.

    The result has NumPy's type; integers wrap.
    """

    def eager(*xs: torch.Tensor) -> torch.Tensor:
        if xs[-1].dtype in _BARE:
            with np.errstate(all="ignore"):
                found = numpy_form(*[x.numpy() for x in xs])
            return torch.from_numpy(np.asarray(found))
        out: torch.Tensor = torch_form(*xs)
        return out

    return eager


def fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x * y + z rounded once, for f32 and f64."""
    rough = x * y + z
    x, y, z = (t.expand(rough.shape) for t in (x, y, z))
    if x.dtype is torch.float64:
        return _fma_f64(x, y, z)
    # The product of two f32 is exact in f64. The sum is rounded to odd (Boldo and Melquiond 2008):
    # 53 >= 24 + 2 bits, so the final rounding to f32 equals a single rounding.
    product = x.double() * y.double()
    addend = z.double()
    total = product + addend
    # Knuth's TwoSum: the exact error of the sum.
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    inexact = (error != 0) & torch.isfinite(total) & torch.isfinite(error)
    even = (bits & 1) == 0
    away = (error > 0) == (total > 0)
    odd = torch.where(away, bits + 1, bits - 1).view(torch.float64)
    return torch.where(inexact & even, odd, total).float()


def _fma_f64(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    rough = x * y + z
    out = rough.flatten().clone()
    triples = zip(x.flatten().tolist(), y.flatten().tolist(), z.flatten().tolist(), strict=True)
    finite = (torch.isfinite(x) & torch.isfinite(y) & torch.isfinite(z)).flatten().tolist()
    for i, (a, b, c) in enumerate(triples):
        if not finite[i]:
            continue
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact == 0:
            continue  # the sign of a zero is that of the unfused form, unless the product is tiny
        try:
            out[i] = float(exact)
        except OverflowError:
            out[i] = float("inf") if exact > 0 else float("-inf")
    return out.reshape(x.shape)


def safe_divisor(y: torch.Tensor) -> torch.Tensor:
    """1 in place of 0 and -1: x % 1 = 0 is the answer, where the lowest integer would trap."""
    unsafe = y == 0 if y.dtype is torch.uint8 else (y == 0) | (y == -1)
    return torch.where(unsafe, torch.ones_like(y), y)


def trunc_quotient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """C division of integers, with x / 0 = x and wrapping of the one overflow; also of floats."""
    if x.dtype.is_floating_point:
        return torch.div(x, y, rounding_mode="trunc")
    if x.dtype in _BARE:
        a, b = np.broadcast_arrays(x.numpy(), y.numpy())
        return torch.from_numpy(np.asarray(a // np.where(b == 0, np.ones_like(b), b)))
    quotient = torch.div(x, safe_divisor(y), rounding_mode="trunc")
    return quotient if x.dtype is torch.uint8 else torch.where(y == -1, -x, quotient)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def where(cond: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """torch.where, which has no unsigned integers of more than 8 bits before torch 2.12."""
    signed = _SIGNED.get(x.dtype)
    if signed is None:
        return torch.where(cond, x, y)
    return torch.where(cond, x.view(signed), y.view(signed)).view(x.dtype)
