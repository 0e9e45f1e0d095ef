"""Arithmetic whose aten ops have further arguments: rounding modes, bounds, powers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lenz import ops
from lenz.ir.dtype import BOOL, F16, F32, I32, I64, DType, compute_dtype
from lenz.ir.expr import Expr, const
from lenz.ir.op import op_named
from lenz.lower.builder import Decline, Fn, GraphBuilder, Index, Value
from lenz.lower.operand import Operand, divisor, element, elementwise, exact, keeps, stepped
from lenz.lower.registry import lowering
from lenz.ops.division import floor_in_steps
from lenz.sym import Sym


def quotient(x: Expr, y: Expr, by: Operand, device: str) -> Expr:
    """x / y, where y is an element of `by`, or `by` itself if it is a number.

    To divide floats by a number on a GPU, torch multiplies by its reciprocal. A second rounding
    shows the difference, as in 8-bit floats: x / 448 may be a tie there.
    """
    of_tensor = isinstance(by, Value) and not by.is_number
    is_exact = of_tensor or device == "cpu" or not x.dtype.is_float
    return x / y if is_exact else x * (1.0 / y)


@lowering("div", "divide")
def div(b: GraphBuilder, x: Operand, y: Operand, rounding_mode: str | None = None) -> Value:
    """x / y, exact, or rounded towards zero ("trunc") or down ("floor")."""
    t, device = b.result.dtype, b.result.device
    # Torch rounds to half types before the last rounding, except with a scalar divisor; on GPUs it
    # keeps more digits for "floor" too.
    one = not isinstance(y, Value) or y.is_number or (y.rank == 0 and device == "cpu")
    steps = t.is_half and not one
    if t.is_integer and not isinstance(y, Value) and y == 0:
        raise Decline("a division by zero is an error in eager")

    def fn(i: Index) -> Expr:
        e = element(x, i, t, kept=keeps("div", device, 0))
        f = divisor(element(y, i, t, kept=True), device)
        if rounding_mode == "floor":
            if steps and device == "cpu":
                return floor_in_steps(e, f, lambda e: stepped(e, t))
            return ops.div_floor(e, f)
        if rounding_mode == "trunc" and e.dtype.is_integer:
            return ops.div_trunc(e, f)
        exact = quotient(e, f, y, device)
        if rounding_mode is None:
            return exact
        return ops.trunc(stepped(exact, t) if steps else exact)

    return b.map(fn)


lowering("floor_divide")(lambda b, x, y: div(b, x, y, "floor"))


@elementwise("angle")
def angle(e: Expr) -> Expr:
    """0 or pi by the sign of a real number; NaN stays NaN."""
    pi, zero = const(math.pi, e.dtype), const(0.0, e.dtype)
    return ops.where(ops.isnan(e), e, ops.where(e < zero, pi, zero))


elementwise("frac")(lambda e: e - ops.trunc(e))
elementwise("reciprocal")(lambda e: ops.reciprocal(e))
elementwise("rsqrt")(lambda e: ops.rsqrt(e))
elementwise("square", "special_square")(lambda e: ops.square(e))  # in i64 for bool


@lowering("round")
def round_(b: GraphBuilder, x: Value, decimals: int = 0) -> Value:
    """The nearest integer, or multiple of a power of ten; ties to even."""
    if decimals == 0 or not x.dtype.is_float:
        return b.map(lambda i: ops.round(x.compute(i)))
    ten = const(10.0 ** abs(decimals) if abs(decimals) < 309 else math.inf, compute_dtype(x.dtype))

    def fn(i: Index) -> Expr:
        e = x.compute(i)
        return ops.round(e * ten) / ten if decimals > 0 else ops.round(e / ten) * ten

    return b.map(fn)


@lowering("clamp", "clip")
def clamp(
    b: GraphBuilder, x: Value, min: Operand | None = None, max: Operand | None = None
) -> Value:
    """x clamped to the bounds; the upper one wins if they cross, any NaN gives NaN."""
    t = b.result.dtype

    def fn(i: Index) -> Expr:
        e = element(x, i, t)
        if min is not None:
            e = ops.maximum(e, element(min, i, t))
        return e if max is None else ops.minimum(e, element(max, i, t))

    return b.map(fn)


# One bound alone.
lowering("clamp_min")(lambda b, x, min: clamp(b, x, min))
lowering("clamp_max")(lambda b, x, max: clamp(b, x, None, max))


@lowering("pow")
def power(b: GraphBuilder, x: Operand, y: Operand) -> Value:
    """x to the power y; small exact exponents become products, roots and quotients."""
    t = b.result.dtype
    if t is BOOL:
        raise Decline("a power of bool")
    if isinstance(y, (bool, int, float)):
        if t.is_integer and y < 0:
            raise Decline("an integer to a negative power is an error in eager")
        # Torch's CPU code does not use sqrt for fp16: (-inf)^0.5 is inf there, and (-0.0)^0.5 is
        # 0.0.
        rooted = t is not F16 or y != 0.5 or b.result.device != "cpu"
        short = _short_power(y, t) if rooted else None
        if t is F32 and 0 < abs(y) < 2.0**-149 and b.result.device == "cpu":
            y = math.copysign(2.0**-149, y)  # eager takes a double, for which this is not 0
        if short is not None:
            return b.map(lambda i: short(element(x, i, t)))
    elif t.is_integer and isinstance(y, Sym) and (y.lo is None or y.lo < 0):
        raise Decline("an integer to a power that may be negative, which is an error in eager")
    if t.is_integer and isinstance(y, (bool, int, float)):
        return b.map(lambda i: _repeated(element(x, i, t), int(y)))
    return b.map(lambda i: ops.apply(op_named("pow"), element(x, i, t), element(y, i, t)))


def _short_power(y: bool | int | float, t: DType) -> Fn | None:
    """The power for an exponent with a special case in eager."""
    if y == 0:
        return lambda e: const(1, e.dtype)
    found = short_powers(ops.mul, ops.sqrt, ops.reciprocal).get(y)
    return found if t.is_float or (y >= 0 and float(y).is_integer()) else None


def short_powers(
    mul: Callable[..., Any], root: Callable[[Any], Any], inverse: Callable[[Any], Any]
) -> dict[float, Callable[[Any], Any]]:
    """The powers with a special case in eager, by their exponents."""
    square: Callable[[Any], Any] = lambda x: mul(x, x)
    return {
        0.5: root,
        -0.5: lambda x: inverse(root(x)),
        -1.0: inverse,
        -2.0: lambda x: inverse(square(x)),
        1.0: lambda x: x,
        2.0: square,
        3.0: lambda x: mul(square(x), x),
    }


def _repeated(e: Expr, n: int) -> Expr:
    """e to the power n >= 0 by repeated squaring; integers wrap."""
    out = const(1, e.dtype)
    while n:
        if n & 1:
            out = out * e
        n >>= 1
        e = ops.square(e) if n else e
    return out


@lowering("ldexp")
def ldexp(b: GraphBuilder, x: Value, exponent: Value) -> Value:
    """x times two to the power of the exponent; exact where that is an integer."""
    t = b.result.dtype
    if x.dtype.is_float and exponent.dtype.is_integer:
        return b.map(lambda i: _scaled(element(x, i, t), exact(exponent, i, I64)))
    return b.map(lambda i: element(x, i, t) * stepped(ops.exp2(element(exponent, i, t)), t))


def _scaled(e: Expr, k: Expr) -> Expr:
    """e * 2**k, k of i64: the last of three factors is the largest; denormals are rounded once."""
    word, low, most = (I32, 23, 126) if e.dtype is F32 else (I64, 52, 1022)
    inside: Callable[[Expr, int], Expr] = lambda x, n: ops.maximum(ops.minimum(x, n), -n)
    k = ops.cast(inside(k, 3 * most), word)
    for times in (2, 1, 0):
        left = inside(k, times * most)
        e = e * ops.bitcast((k - left + (most + 1)) << low, e.dtype)
        k = left
    return e


@lowering("frexp.Tensor")
def frexp(b: GraphBuilder, x: Value) -> tuple[Value, Value]:
    """x as a fraction in [0.5, 1) times a power of two; 0, infinities and NaN stay."""
    if not x.dtype.is_float:
        raise Decline("frexp of integers")
    t = compute_dtype(x.dtype)
    word, low, top = (I32, 23, 0xFF) if t is F32 else (I64, 52, 0x7FF)
    tiny, up = torch.finfo(t.torch).tiny, low + 2

    def parts(i: Index) -> tuple[Expr, Expr]:
        e = x.compute(i)
        # Denormal numbers are scaled first to get an exponent.
        small = abs(e) < tiny
        bits = ops.bitcast(ops.where(small, e * 2.0**up, e), word)
        own = (bits >> low) & top
        still = ops.eq(e, 0.0) | ops.eq(own, top)
        half = (bits & ~(top << low)) | ((top // 2 - 1) << low)
        bias = ops.where(small, const(top // 2 - 1 + up, word), const(top // 2 - 1, word))
        power = ops.where(still, 0, own - bias)
        return ops.where(still, e, ops.bitcast(half, t)), ops.cast(power, I32)

    return b.map(lambda i: parts(i)[0]), b.map(lambda i: parts(i)[1], b.results[1], "exponent")


@elementwise("heaviside", tensors=2)
def heaviside(e: Expr, at_zero: Expr) -> Expr:
    """0 below zero, 1 above, `at_zero` at zero; 0 for NaN."""
    zero, one = const(0, e.dtype), const(1, e.dtype)
    return ops.where(ops.eq(e, zero), at_zero, ops.where(e > zero, one, zero))


def _xlog(b: GraphBuilder, x: Operand, y: Operand, log: Fn) -> Value:
    t = b.result.dtype

    def fn(i: Index) -> Expr:
        e, f = element(x, i, t), element(y, i, t)
        factor = stepped(log(f), t) if b.result.device == "cpu" else log(f)
        product = ops.where(ops.eq(e, 0.0), 0.0, e * factor)
        return ops.where(ops.isnan(f), f, product)

    return b.map(fn)


lowering("xlogy", "special_xlogy")(lambda b, x, y: _xlog(b, x, y, ops.log))
lowering("special_xlog1py")(lambda b, x, y: _xlog(b, x, y, ops.log1p))


@elementwise("logaddexp", tensors=2)
def logaddexp(e: Expr, f: Expr, base: float = math.e) -> Expr:
    """max + log(1 + exp(min - max)); equal infinities stay."""
    gap = -abs(e - f)
    rest = ops.log1p(ops.exp(gap) if base == math.e else ops.exp2(gap))
    rest = rest if base == math.e else rest * (1.0 / math.log(base))
    return ops.where(ops.isinf(e) & ops.eq(e, f), e, ops.maximum(e, f) + rest)


elementwise("logaddexp2", tensors=2)(lambda e, f: logaddexp(e, f, 2.0))
