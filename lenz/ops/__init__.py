"""The scalar op table: importing this package fills it, and gives a builder function per op.

    from lenz import ops
    ops.exp(ops.mul(x, y))

Every builder takes expressions of one type and gives the simplest equal expression (`fold.py`).
"""

from __future__ import annotations

from lenz.ops.arith import (
    abs,
    add,
    ceil,
    copysign,
    div,
    floor,
    fma,
    fmax,
    fmin,
    maximum,
    minimum,
    mul,
    neg,
    reciprocal,
    round,
    rsqrt,
    sqrt,
    square,
    sub,
    trunc,
)
from lenz.ops.bits import (
    and_,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    not_,
    or_,
    shift_left,
    shift_right,
    shl,
    shr,
    truth,
    xor,
)
from lenz.ops.cast import bitcast, cast, narrow
from lenz.ops.compare import (
    eq,
    ge,
    gt,
    isfinite,
    isinf,
    isnan,
    le,
    lt,
    ne,
    signbit,
    where,
)
from lenz.ops.division import div_floor, div_trunc, fmod, remainder
from lenz.ops.fold import apply, is_const, is_value, value_of
from lenz.ops.math import (
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    cos,
    cosh,
    erf,
    exp,
    exp2,
    expm1,
    log,
    log1p,
    log2,
    log10,
    sin,
    sinh,
    tan,
    tanh,
)
from lenz.ops.special import or_libm, scale

__all__ = [
    "abs", "acos", "acosh", "add", "and_", "apply", "asin", "asinh", "atan", "atan2", "atanh",
    "bitcast", "cast", "ceil", "copysign", "cos", "cosh", "div", "div_floor", "div_trunc", "eq",
    "erf", "exp", "exp2", "expm1", "floor", "fma", "fmax", "fmin", "fmod", "ge", "gt", "is_const",
    "is_value", "isfinite", "isinf", "isnan", "le", "log", "log10", "log1p", "log2", "logical_and",
    "logical_not", "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul", "narrow", "ne",
    "neg", "not_", "or_", "or_libm", "reciprocal", "remainder", "round", "rsqrt", "scale",
    "shift_left", "shift_right", "shl", "shr", "signbit", "sin", "sinh", "sqrt", "square", "sub",
    "tan", "tanh", "trunc", "truth", "value_of", "where", "xor",
]  # fmt: skip
