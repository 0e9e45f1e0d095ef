"""Comparisons, tests of floats, and the choice between two values."""

from __future__ import annotations

from typing import Any

import torch

from lenz.ir.dtype import BOOL, DType
from lenz.ir.expr import Expr, Number, const, exact_place
from lenz.ir.op import Attrs, Op, Types, on
from lenz.ops import reference
from lenz.ops.emission import Builder, Emit, TritonForm, Values, compare_by_kind, text_by_kind
from lenz.ops.fold import apply, binary, typed
from lenz.ops.rules import COMPARABLE, FLOATS, int_of_width, number_op, to_bool, where_rule
from lenz.sym import Sym

_INF = float("inf")


def _order(name: str, sign: str, also: str) -> Op:
    equality = name in ("eq", "ne")
    # A comparison with NaN is false, except for ne, the negation of eq.
    floats = "fcmp une" if name == "ne" else f"fcmp o{name}"
    signed, unsigned = [f"icmp {'' if equality else kind}{name}" for kind in "su"]
    kinds = {"float": floats, "int": signed, "uint": unsigned, "bool": unsigned}
    forms = on(cpu=compare_by_kind(kinds), cuda=f"{{0}} {sign} {{1}}")
    # `aten.equal` compares whole tensors.
    facts = {"aten": (name,) if name == "eq" else (name, also), "commutes": equality}
    return number_op(name, 2, to_bool(COMPARABLE), also, forms=forms, promotion="bool", **facts)


EQ = _order("eq", "==", "equal")
NE = _order("ne", "!=", "not_equal")
LT = _order("lt", "<", "less")
LE = _order("le", "<=", "less_equal")
GT = _order("gt", ">", "greater")
GE = _order("ge", ">=", "greater_equal")


def _emit_isnan(b: Builder, _: DType, args: Types, xs: Values, __: Attrs) -> Any:
    return b.compare("fcmp uno", args[0], xs[0], xs[0])


def _against_infinity(predicate: str) -> Emit:
    def emit(b: Builder, _: DType, args: Types, xs: Values, __: Attrs) -> Any:
        magnitude = b.intrinsic("llvm.fabs", args[0], xs[0])
        return b.compare(predicate, args[0], magnitude, _INF)

    return emit


def _emit_signbit(b: Builder, _: DType, args: Types, xs: Values, __: Attrs) -> Any:
    as_int = int_of_width(args[0].bits)
    bits = b.convert("bitcast", as_int, args[0], xs[0])
    return b.compare("icmp slt", as_int, bits, 0)


def _test(name: str, emit: Emit, triton: str | TritonForm) -> Op:
    forms = on(cpu=emit, cuda=triton)
    return Op(name, 1, to_bool(FLOATS), getattr(torch, name), forms=forms)


ISNAN = _test("isnan", _emit_isnan, "{0} != {0}")
ISINF = _test("isinf", _against_infinity("fcmp oeq"), "tl.abs({0}) == float('inf')")
ISFINITE = _test("isfinite", _against_infinity("fcmp olt"), "tl.abs({0}) < float('inf')")
_SIGNBIT_TEXT = text_by_kind(
    f32="tl.cast({0}, tl.int32, bitcast=True) < 0", f64="tl.cast({0}, tl.int64, bitcast=True) < 0"
)
SIGNBIT = _test("signbit", _emit_signbit, _SIGNBIT_TEXT)
_SELECT: Emit = lambda b, dtype, _, xs, __: b.select(xs[0], dtype, xs[1], xs[2])
_WHERE_FORMS = on(cpu=_SELECT, cuda="tl.where({0}, {1}, {2})")
WHERE = Op("where", 3, where_rule, reference.where, forms=_WHERE_FORMS)


eq = binary(EQ, "x == y; false when either is NaN.")
ne = binary(NE, "x != y; true when either is NaN.")
lt = binary(LT, "x < y.")
le = binary(LE, "x <= y.")
gt = binary(GT, "x > y.")
ge = binary(GE, "x >= y.")


def isnan(x: Expr) -> Expr:
    """True for NaN; false for every integer."""
    return apply(ISNAN, x) if x.dtype.is_float else const(False, BOOL)


def isinf(x: Expr) -> Expr:
    """True for both infinities; false for every integer."""
    return apply(ISINF, x) if x.dtype.is_float else const(False, BOOL)


def isfinite(x: Expr) -> Expr:
    """True unless x is NaN or an infinity; true for every integer."""
    return apply(ISFINITE, x) if x.dtype.is_float else const(True, BOOL)


def signbit(x: Expr) -> Expr:
    """True if the sign bit is set, also for -0.0; x < 0 for integers."""
    return apply(SIGNBIT, x) if x.dtype.is_float else x < 0


def where(cond: Expr, x: Expr | Number, y: Expr | Number) -> Expr:
    """x where cond is true, else y; both are evaluated."""
    return apply(WHERE, cond, *typed(x, y))


def sides_of(e: Expr, *tests: Op) -> tuple[Sym, Sym] | None:
    """The exact positions on both sides of one of these comparisons; None for all else."""
    left, right = map(exact_place, e.args) if e.op in tests else (None, None)
    return None if left is None or right is None else (left, right)


def sign(x: Expr) -> Expr:
    """1, 0 or -1; 0 for NaN, as in torch; a bool stays."""
    if x.dtype is BOOL:
        return x
    zero, one = const(0, x.dtype), const(1, x.dtype)
    if x.dtype.kind == "uint":
        return where(ne(x, zero), one, zero)
    return where(x > zero, one, where(x < zero, -1, zero))
