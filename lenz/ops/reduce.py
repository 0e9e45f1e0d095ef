"""The type rule of reductions, and the combination of two values in scans and updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce

from lenz.ir.dtype import BOOL, F64, I64, DType, compute_dtype
from lenz.ir.expr import Expr, const
from lenz.ir.graph import identity_of
from lenz.ops.arith import add, fma, maximum, minimum, mul
from lenz.ops.bits import and_, or_
from lenz.ops.cast import bitcast, cast
from lenz.ops.compare import isinf, where
from lenz.ops.math import exp, log1p
from lenz.ops.poly import polynomial

_MAGIC = 1.5 * 2.0**52  # added to a number, it leaves the nearest integer in the low bits
# ln 2, also as high + low; the high part has 32 bits, so that k * high is exact.
_LN2, _LN2_HIGH, _LN2_LOW = math.log(2.0), 0.6931471803691238, 1.9082149292705877e-10


def reduce_dtype(kind: str, dtype: DType) -> DType:
    """Type of the result of reducing values of `dtype`: positions are i64, any and all are bool."""
    if kind in ("argmax", "argmin"):
        return I64
    return BOOL if kind in ("any", "all") else dtype


def of_one(kind: str, e: Expr) -> Expr:
    """The reduction of one element. Sums start with 0.0, so none is -0.0."""
    to = reduce_dtype(kind, e.dtype)
    if kind in ("argmax", "argmin"):
        return const(0, to)
    return e + 0 if kind == "sum" and to.is_float else cast(e, to)


def _logaddexp(x: Expr, y: Expr) -> Expr:
    """log(e^x + e^y) = max + log(1 + e^(min - max)); an infinite maximum wins."""
    high = maximum(x, y)
    below = minimum(x, y) - high
    more = _log1p_exp(below) if x.dtype is F64 else log1p(exp(below))
    return where(isinf(high), high, high + more)


def _log1p_exp(x: Expr) -> Expr:
    """log(1 + e^x) of an f64 x <= 0, within 3 ulp, in vectors: the C library takes one lane each.
    Denormal e^x count as 0.

    e^x = 2^k e^r with |r| <= ln2 / 2, by Taylor's series of degree 13. With t = e^x or, above 0.41,
    (e^x - 1) / 2, which leaves ln2: log(1 + t) = 2 atanh(s), s = t / (2 + t), |s| < 0.18.
    """
    shifted = fma(x, 1.0 / _LN2, _MAGIC)
    k = shifted - _MAGIC
    r = fma(k, -_LN2_LOW, fma(k, -_LN2_HIGH, x))
    power = bitcast((bitcast(shifted, I64) << 52) + (1023 << 52), F64)
    t = polynomial([1.0 / math.factorial(n) for n in range(14)], r) * power
    t = where(x < -708.0, 0.0, t)
    great = t > 0.41
    s = where(great, t - 1.0, t) / (t + where(great, const(3.0, F64), 2.0))
    square = s * s
    tail = square * polynomial([2.0 / (2 * n + 3) for n in range(10)], square)
    return where(great, const(_LN2, F64), 0.0) + fma(s, tail, s + s)


_COMBINE: Mapping[str, Callable[[Expr, Expr], Expr]] = {
    "sum": add,
    "add": add,
    "prod": mul,
    "mul": mul,
    "max": maximum,
    "min": minimum,
    "any": or_,
    "all": and_,
    "logaddexp": _logaddexp,
}


def combine(kind: str, x: Expr, y: Expr) -> Expr:
    """Combine two values of a reduction, scan or update; halves are combined in f32.

    `x` is the earlier one. Raises TypeError for bool: use maxima for sums, minima for products.
    """
    dtype = x.dtype
    wide = compute_dtype(dtype)
    return cast(_COMBINE[kind](cast(x, wide), cast(y, wide)), dtype)


def total(terms: Sequence[Expr], kind: str = "sum") -> Expr:
    """The sum of some terms in order, or another reduction of them."""
    to = reduce_dtype(kind, terms[0].dtype)
    rest = [cast(e, to) for e in terms[1:]]
    return reduce(partial(combine, kind), rest, of_one(kind, terms[0]))


def neutral(kind: str, dtype: DType) -> Expr:
    """The neutral element of this kind of reduction, scan or update."""
    return const(identity_of(kind, dtype), dtype)
