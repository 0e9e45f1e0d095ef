"""The type rule of reductions, and how two values of a scan or an update combine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from lenz.ir.dtype import BOOL, I64, DType, compute_dtype
from lenz.ir.expr import Expr, const
from lenz.ops.arith import add, maximum, minimum, mul, sub
from lenz.ops.cast import cast
from lenz.ops.compare import isinf, where
from lenz.ops.math import exp, log1p


def reduce_dtype(kind: str, dtype: DType) -> DType:
    """Type of the result of reducing values of `dtype`: positions are i64, any and all are bool."""
    if kind in ("argmax", "argmin"):
        return I64
    return BOOL if kind in ("any", "all") else dtype


def _logaddexp(x: Expr, y: Expr) -> Expr:
    """log(e^x + e^y) = max + log(1 + e^(min - max)); a greatest operand that is infinite wins."""
    high = maximum(x, y)
    return where(isinf(high), high, add(high, log1p(exp(sub(minimum(x, y), high)))))


_COMBINE: Mapping[str, Callable[[Expr, Expr], Expr]] = {
    "sum": add,
    "add": add,
    "prod": mul,
    "mul": mul,
    "max": maximum,
    "min": minimum,
    "logaddexp": _logaddexp,
}


def combine(kind: str, x: Expr, y: Expr) -> Expr:
    """Both values of a scan, or of an update of an element, as one; halves are combined in f32.

    `x` is the earlier one. Raises TypeError for bool, whose sums are maxima and products minima.
    """
    dtype = x.dtype
    wide = compute_dtype(dtype)
    return cast(_COMBINE[kind](cast(x, wide), cast(y, wide)), dtype)


def neutral(kind: str, dtype: DType) -> Expr:
    """The value that changes no reduction, scan or update of the kind."""
    if kind in ("sum", "add", "any"):
        return const(0, dtype)
    if kind in ("prod", "mul", "all"):
        return const(1, dtype)
    is_max = kind == "max"
    if dtype.is_float:
        return const(-math.inf if is_max else math.inf, dtype)
    if dtype is BOOL:
        return const(not is_max, dtype)
    signed = dtype.kind == "int"
    low, high = -(1 << (dtype.bits - 1)) if signed else 0, (1 << (dtype.bits - signed)) - 1
    return const(low if is_max else high, dtype)
