"""Arithmetic of integers and floats: one entry per op, and a function that builds it.

Integers wrap. Floats follow IEEE 754 in the type of their operands (f32 or f64).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lenz.ir.dtype import DType
from lenz.ir.expr import Expr, Number, const
from lenz.ir.op import Attrs, Emission, Op, Types, on
from lenz.ops import reference
from lenz.ops.emission import Builder, Values, by_kind, intrinsic, text_by_kind, triton_type
from lenz.ops.fold import apply, binary, entered, typed, unary
from lenz.ops.rules import COMPARABLE, FLOATS, NUMBERS, float_op, int_of_width, number_op, same


def _emit_neg(b: Builder, dtype: DType, _: Types, xs: Values, __: Attrs) -> Any:
    # -0.0 - x is -x for every x; 0.0 - x would lose the sign of zero.
    opcode, zero = ("fsub", -0.0) if dtype.is_float else ("sub", 0)
    return b.binary(opcode, dtype, b.constant(dtype, zero), xs[0])


def _emit_abs(b: Builder, dtype: DType, args: Types, xs: Values, attrs: Attrs) -> Any:
    (x,) = xs
    if dtype.is_float:
        return b.intrinsic("llvm.fabs", dtype, x)
    if dtype.kind == "uint":
        return x
    negated = _emit_neg(b, dtype, args, xs, attrs)
    return b.select(b.compare("icmp slt", dtype, x, 0), dtype, negated, x)


def _extremum(float_pred: str, int_pred: str, *, skip_nan: bool) -> Callable[..., Any]:
    """select(x < y, x, y) gives y if either is NaN; a second select handles NaN."""

    def emit(b: Builder, dtype: DType, _: Types, xs: Values, __: Attrs) -> Any:
        x, y = xs
        if not dtype.is_float:
            sign = "s" if dtype.kind == "int" else "u"
            cond = b.compare(f"icmp {sign}{int_pred}", dtype, x, y)
            return b.select(cond, dtype, x, y)
        least = b.select(b.compare(f"fcmp {float_pred}", dtype, x, y), dtype, x, y)
        odd_one = y if skip_nan else x
        return b.select(b.compare("fcmp uno", dtype, odd_one, odd_one), dtype, x, least)

    return emit


def _extremum_text(name: str, logical: str) -> Emission:
    whole = f"tl.{name}({{0}}, {{1}})"
    strict = f"tl.{name}({{0}}, {{1}}, propagate_nan=tl.PropagateNan.ALL)"
    return text_by_kind(float=strict, int=whole, uint=whole, bool=f"{{0}} {logical} {{1}}")


def _copysign_text(dtype: DType, _: Types, xs: tuple[str, ...], __: Attrs) -> str:
    """One instruction that joins bits of both operands."""
    whole, sign = triton_type(int_of_width(dtype.bits)), 1 << (dtype.bits - 1)
    x, y = [f"tl.cast({x}, {whole}, bitcast=True)" for x in xs]
    return f"tl.cast(({x} & {sign - 1}) | ({y} & {-sign}), {triton_type(dtype)}, bitcast=True)"


def _round_text(dtype: DType, args: Types, xs: tuple[str, ...], _: Attrs) -> str:
    """|x| + 2^23 has no bits for a fraction, so the sum is rounded to even; 2^52 in f64."""
    limit = {32: 2.0**23, 64: 2.0**52}[dtype.bits]
    rounded = f"(tl.abs({xs[0]}) + {limit}) - {limit}"
    signed = _copysign_text(dtype, args, (rounded, xs[0]), ())
    return f"tl.where(tl.abs({xs[0]}) < {limit}, {signed}, {xs[0]})"


def _arithmetic(name: str, sign: str, numpy_name: str, **more: Any) -> Op:
    """A sum or product of numbers; of bools it is logical."""
    logical, joined = ("or", "|") if name == "add" else ("and", "&")
    text = f"{{0}} {sign} {{1}}"
    forms = on(
        cpu=by_kind({"float": f"f{name}", "int": name, "uint": name, "bool": logical}),
        cuda=text_by_kind(float=text, int=text, uint=text, bool=f"{{0}} {joined} {{1}}"),
    )
    return number_op(name, 2, same(COMPARABLE), numpy_name, forms=forms, commutes=True, **more)


ADD = _arithmetic("add", "+", "add")
SUB = number_op(
    "sub",
    2,
    same(NUMBERS),
    "subtract",
    forms=on(cpu=by_kind({"float": "fsub", "int": "sub", "uint": "sub"}), cuda="{0} - {1}"),
)
MUL = _arithmetic("mul", "*", "multiply", aten=("mul", "multiply"))
NEG = number_op(
    "neg",
    1,
    same(NUMBERS),
    "negative",
    # Triton turns the literal -0.0 into 0.0, and 0.0 - x would lose the sign of zero.
    forms=on(cpu=_emit_neg, cuda=text_by_kind(float="{0} * -1.0", int="0 - {0}", uint="0 - {0}")),
    aten=("neg", "negative"),
)
_ABS_FORMS = on(cpu=_emit_abs, cuda="tl.abs({0})")
ABS = number_op("abs", 1, same(NUMBERS), "abs", forms=_ABS_FORMS, aten=("abs", "absolute"))
DIV = Op(
    "div",
    2,
    same(FLOATS),
    torch.true_divide,
    forms=on(
        cpu=by_kind({"float": "fdiv"}),
        cuda=text_by_kind(f32="tl.div_rn({0}, {1})", f64="{0} / {1}"),
    ),
    aten=("true_divide",),
    promotion="int_to_float",
    cost=4.0,
)
FMA = Op(
    "fma",
    3,
    same(FLOATS),
    reference.fma,
    forms=on(cpu=intrinsic("llvm.fma"), cuda="tl.fma({0}, {1}, {2})"),
)


def _rounded(name: str, llvm: str, triton: Emission, arity: int = 1, **more: Any) -> Op:
    """A float function with an instruction, rounded at most once."""
    return float_op(name, arity, forms=on(cpu=intrinsic(f"llvm.{llvm}"), cuda=triton), **more)


SQRT = _rounded(
    "sqrt",
    "sqrt",
    text_by_kind(f32="tl.sqrt_rn({0})", f64="tl.sqrt({0})"),
    aten=("sqrt",),
    promotion="int_to_float",
    cost=5.0,
    domain=(0.0, 1e6),
    ulp=0.51,  # correctly rounded; torch's own vector loop is not
)
FLOOR = _rounded("floor", "floor", "tl.floor({0})")
CEIL = _rounded("ceil", "ceil", "tl.ceil({0})")
TRUNC = _rounded("trunc", "trunc", "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))")
ROUND = _rounded("round", "roundeven", _round_text)
COPYSIGN = _rounded(
    "copysign", "copysign", _copysign_text, 2, aten=("copysign",), promotion="int_to_float"
)


def _extreme(name: str, types: Types, triton: Emission) -> Op:
    """The minimum or maximum of two; ops with C's names return the other operand if one is NaN."""
    preds = ("olt", "lt") if name in ("minimum", "fmin") else ("ogt", "gt")
    forms = on(cpu=_extremum(*preds, skip_nan=name in ("fmin", "fmax")), cuda=triton)
    return number_op(name, 2, same(types), name, forms=forms, aten=(name,), commutes=True, cost=1.5)


# As in torch, the sign of the zero in minimum(0.0, -0.0) and the like is not specified.
MINIMUM = _extreme("minimum", COMPARABLE, _extremum_text("minimum", "&"))
MAXIMUM = _extreme("maximum", COMPARABLE, _extremum_text("maximum", "|"))
FMIN = _extreme("fmin", NUMBERS, "tl.minimum({0}, {1})")
FMAX = _extreme("fmax", NUMBERS, "tl.maximum({0}, {1})")


add = binary(ADD, "x + y; logical or for bool.")
sub = binary(SUB, "x - y.")
mul = binary(MUL, "x * y; logical and for bool.")
neg = unary(NEG, "-x.")
abs = unary(ABS, "The absolute value; the lowest signed integer stays.")
div = binary(DIV, "x / y of floats.")
sqrt = unary(SQRT, "The square root, correctly rounded; NaN below zero.")
copysign = binary(COPYSIGN, "The magnitude of x with the sign of y.")
minimum = binary(MINIMUM, "The smaller one, NaN if either is NaN; logical and for bool.")
maximum = binary(MAXIMUM, "The larger one, NaN if either is NaN; logical or for bool.")


def square(x: Expr) -> Expr:
    """x * x."""
    return apply(MUL, x, x)


def reciprocal(x: Expr) -> Expr:
    """1 / x of a float."""
    return apply(DIV, const(1.0, x.dtype), x)


def fma(x: Expr | Number, y: Expr | Number, z: Expr | Number) -> Expr:
    """x * y + z of floats, rounded once."""
    return apply(FMA, *typed(x, y, z))


def rsqrt(x: Expr) -> Expr:
    """1 / sqrt(x), within 1.5 units in the last place."""
    return apply(DIV, const(1.0, x.dtype), apply(SQRT, x))


def _whole(op: Op, doc: str) -> Callable[[Expr], Expr]:
    """The function that rounds a float by an op; an integer stays."""
    return entered(op, doc, lambda x: apply(op, x) if x.dtype.is_float else x)


floor = _whole(FLOOR, "The largest integer not above x; an integer stays.")
ceil = _whole(CEIL, "The smallest integer not below x; an integer stays.")
trunc = _whole(TRUNC, "x rounded towards zero; an integer stays.")
round = _whole(ROUND, "The nearest integer, ties to even; an integer stays.")
