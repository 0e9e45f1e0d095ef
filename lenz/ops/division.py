"""Rounded division and remainders of integers and floats, as in torch.

Integers never trap: x / 0 gives x with remainder 0 (eager raises an error there), and the one
overflowing quotient wraps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lenz.ir.dtype import BOOL, DType
from lenz.ir.expr import Expr, const
from lenz.ir.op import Attrs, Op, OpForm, Types, on
from lenz.ops import reference
from lenz.ops.arith import copysign, floor, trunc
from lenz.ops.compare import eq, ne, where
from lenz.ops.emission import Builder, Values, by_kind, text_by_kind
from lenz.ops.fold import apply, binary
from lenz.ops.rules import INTS, NUMBERS, same


def _emit_fmod(b: Builder, dtype: DType, _: Types, xs: Values, __: Attrs) -> Any:
    if not dtype.is_float:
        return b.binary("srem" if dtype.kind == "int" else "urem", dtype, xs[0], xs[1])
    exact: Callable[[], Any] = lambda: b.libm("fmod", dtype, xs[0], xs[1])
    return _float_fmod(b, dtype, xs[0], xs[1], exact) if b.has("fma") else exact()


def _float_fmod(b: Builder, dtype: DType, x: Any, y: Any, exact: Callable[[], Any]) -> Any:
    """x - q * y for q = trunc(x / y), which one fma computes without rounding.

    The rounded x / y may reach the next integer, but never falls below the one before it: then one
    y is added back, and the sum is exact too, as the remainder is a number of the type. Quotients
    with a part below 1 that the type cannot hold, infinities and NaN are left to the C function,
    which takes 12 times as long.
    """
    quotient = b.intrinsic("llvm.trunc", dtype, b.binary("fdiv", dtype, x, y))
    whole = 2.0**23 if dtype.bytes == 4 else 2.0**52
    size = b.intrinsic("llvm.fabs", dtype, quotient)
    large = b.compare("fcmp uge", dtype, size, whole)  # or NaN
    divisor = b.intrinsic("llvm.fabs", dtype, y)
    infinite = b.compare("fcmp oeq", dtype, divisor, np.inf)
    minus = b.binary("fsub", dtype, b.constant(dtype, -0.0), quotient)
    rest = b.intrinsic("llvm.fma", dtype, minus, y, x)
    signed = b.intrinsic("llvm.copysign", dtype, rest, x)
    back = b.binary("fadd", dtype, rest, b.intrinsic("llvm.copysign", dtype, y, x))
    found = b.select(b.compare("fcmp one", dtype, rest, signed), dtype, back, signed)
    return b.rare(b.binary("or", BOOL, large, infinite), dtype, found, exact)


# Division by 0 or -1 becomes one by 1: in LLVM x / 0 and (lowest x) / -1 are undefined.
_BY_ONE = "tl.where({1} == 0, 1, {1})"
_BY_ONE_SIGNED = "tl.where(({1} == 0) | ({1} == -1), 1, {1})"
_QUOTIENT = text_by_kind(
    int=f"tl.where({{1}} == -1, 0 - {{0}}, {{0}} // {_BY_ONE_SIGNED})", uint=f"{{0}} // {_BY_ONE}"
)
_REST = {"int": f"{{0}} % {_BY_ONE_SIGNED}", "uint": f"{{0}} % {_BY_ONE}"}
_DIVIDE = by_kind({"int": "sdiv", "uint": "udiv"})


def _numpy_fmod(x: Any, y: Any) -> Any:
    return np.fmod(x, np.where(y == 0, np.ones_like(y), y))


def _torch_fmod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not x.dtype.is_floating_point:
        return torch.fmod(x, reference.safe_divisor(y))
    # torch's vector loop gives NaN for denormal divisors and large quotients; C's fmod is exact.
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.fmod(x.numpy(), y.numpy())))


def _torch_remainder(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not x.dtype.is_floating_point:
        return torch.remainder(x, reference.safe_divisor(y))
    m = _torch_fmod(x, y)
    return torch.where((m != 0) & ((m < 0) != (y < 0)), m + y, m)


def _float_floor(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """torch.div(rounding_mode="floor") with an exact fmod."""
    m = _torch_fmod(x, y)
    quotient = (x - m) / y
    quotient = torch.where((m != 0) & ((y < 0) != (m < 0)), quotient - 1, quotient)
    below = torch.floor(quotient)
    whole = torch.where(quotient - below > 0.5, below + 1, below)
    whole = torch.where(quotient == 0, torch.copysign(torch.zeros_like(x), x / y), whole)
    return torch.where(y == 0, x / y, whole)


def _eager_floor(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype.is_floating_point:
        return _float_floor(x, y)
    quotient = reference.trunc_quotient(x, y)
    if not x.dtype.is_signed:
        return quotient
    inexact = _torch_fmod(x, y) != 0
    return quotient - (inexact & ((x < 0) != (y < 0))).to(x.dtype)


def _expand_remainder(x: Expr, y: Expr) -> Expr:
    """fmod, shifted by one divisor if its sign differs from the divisor's."""
    m = apply(FMOD, x, y)
    if y.dtype.kind == "uint":
        return m
    apart = ne(m < 0, y < 0) if y.dtype.is_float else (m ^ y) < 0
    return where(ne(m, 0) & apart, m + y, m)


def _expand_floor_int(x: Expr, y: Expr) -> Expr:
    quotient = apply(DIV_TRUNC, x, y)
    if x.dtype.kind == "uint":
        return quotient
    m = x - quotient * y
    # Division by zero gives x without a remainder: m is x there, and must not count.
    apart = ne(m, 0) & ne(y, 0) & ((x ^ y) < 0)
    return where(apart, quotient - 1, quotient)


def _expand_floor(x: Expr, y: Expr) -> Expr:
    """Python's float floor division: the floor of the exact quotient, not of the rounded one."""
    return floor_in_steps(x, y, lambda e: e) if x.dtype.is_float else _expand_floor_int(x, y)


def floor_in_steps(x: Expr, y: Expr, step: Callable[[Expr], Expr]) -> Expr:
    """Floor division of floats; `step` rounds the result of each operation."""
    zero = const(0.0, x.dtype)
    m = apply(FMOD, x, y)
    quotient = step(step(x - m) / y)
    apart = ne(m, zero) & ne(y < zero, m < zero)
    quotient = where(apart, step(quotient - 1.0), quotient)
    # (x - m) / y is an integer up to rounding.
    below = floor(quotient)
    high = step(quotient - below) > 0.5
    whole = where(high, step(below + 1.0), below)
    whole = where(eq(quotient, zero), copysign(zero, x / y), whole)
    return where(eq(y, zero), x / y, whole)


def _division(name: str, eager: Callable[..., Any], *, cost: float, **given: Any) -> Op:
    """A quotient or a remainder of two numbers of one type."""
    return Op(name, 2, same(NUMBERS), eager, cost=cost, domain=(-100.0, 100.0), **given)


DIV_TRUNC = _division(
    "div_trunc",
    reference.trunc_quotient,
    cost=8.0,
    expand=lambda x, y: trunc(x / y),
    forms=on(cpu=OpForm(_DIVIDE, types=INTS), cuda=OpForm(_QUOTIENT, types=INTS)),
)
FMOD = _division(
    "fmod",
    reference.with_numpy(_torch_fmod, _numpy_fmod),
    cost=10.0,
    forms=on(cpu=_emit_fmod, cuda=text_by_kind(float="libdevice.fmod({0}, {1})", **_REST)),
    aten=("fmod",),
)
DIV_FLOOR = _division(
    "div_floor", _eager_floor, cost=14.0, expand=_expand_floor, aten=("floor_divide",)
)
REMAINDER = _division(
    "remainder",
    reference.with_numpy(_torch_remainder, _numpy_fmod),
    cost=14.0,
    expand=_expand_remainder,
    aten=("remainder",),
)


div_trunc = binary(DIV_TRUNC, "x / y rounded towards zero.")
div_floor = binary(
    DIV_FLOOR, "x / y rounded down: Python's // for integers, torch's floor division for floats."
)
fmod = binary(FMOD, "The remainder with the sign of x (C's % and fmod).")
remainder = binary(REMAINDER, "The remainder with the sign of y (Python's %).")
