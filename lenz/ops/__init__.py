"""The scalar op table: importing this package fills it, and gives builder functions.

    from lenz import ops
    ops.exp(ops.mul(x, y))

Every builder takes expressions of one type and returns the simplest equal expression (`fold.py`).
"""

from __future__ import annotations

from lenz.ir.op import STRUCTURAL, all_ops
from lenz.ops.arith import (
    abs,
    add,
    ceil,
    copysign,
    div,
    floor,
    fma,
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
from lenz.ops.bits import and_, logical_not, not_, or_, shl, shr, truth, xor
from lenz.ops.cast import bitcast, cast, narrow
from lenz.ops.check import assert_in_range, assert_nonzero, assert_not
from lenz.ops.compare import eq, ge, gt, isfinite, isinf, isnan, le, lt, ne, sign, signbit, where
from lenz.ops.division import div_floor, div_trunc, fmod, remainder
from lenz.ops.fold import apply, is_const, is_value, value_of
from lenz.ops.math import (
    atan2,
    cos,
    cosh,
    erf,
    erfinv,
    exp,
    exp2,
    expm1,
    log,
    log1p,
    one_plus_erf,
    sigmoid,
    sin,
    sinh,
    tan,
    tanh,
)
from lenz.ops.power import hypot, pow
from lenz.ops.random import below as random_below
from lenz.ops.random import normal, rand_bits, shared_bits, uniform
from lenz.ops.reduce import combine, neutral, of_one, reduce_dtype, total
from lenz.ops.rules import BEFORE
from lenz.ops.special import or_libm, scale

OWN = STRUCTURAL + len(all_ops()) - BEFORE  # lenz's own ops, without the user's
