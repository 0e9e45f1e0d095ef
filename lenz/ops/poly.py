"""Elementary functions of f32 in simpler ops: the expansions of `math.py`.

Argument reduction and reconstruction follow Cody and Waite, "Software Manual for the Elementary
Functions" (1980), and Muller, "Elementary Functions" (3rd ed. 2016); the polynomials are our own
(`coefficients.py`). All forms are branch-free, keep NaN, infinities, signed zeros and denormals,
and are within 2.2 units in the last place unless the entry in `math.py` says otherwise.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from lenz.ir.dtype import F32, F64, I32, I64
from lenz.ir.expr import Expr, const
from lenz.ops import coefficients as c
from lenz.ops.arith import abs, copysign, fma, sqrt, square
from lenz.ops.cast import bitcast, cast
from lenz.ops.compare import eq, ge, ne, where
from lenz.ops.special import or_libm, scale

_MAGIC = 1.5 * 2.0**23
_WIDE_MAGIC = 1.5 * 2.0**52
_INF = float("inf")
_NAN = float("nan")
_LN2 = math.log(2.0)
# ln 2 = high + low; the high part has 15 bits, so that k * high is exact for |k| <= 2^9.
_LN2_HIGH = 0.693145751953125
_LN2_LOW = 1.4286068203094173e-06


def polynomial(coefficients: Sequence[float], x: Expr) -> Expr:
    """Horner's scheme with fma, in the type of x; coefficients lowest power first."""
    total = const(coefficients[-1], x.dtype)
    for coefficient in reversed(coefficients[:-1]):
        total = fma(total, x, coefficient)
    return total


def odd_polynomial(coefficients: Sequence[float], x: Expr) -> Expr:
    """x + x (x^2 p(x^2)): x^3 may be subnormal, and such numbers take CPUs ten times as long."""
    s = x * x
    return fma(s * polynomial(coefficients, s), x, x)


def to_nearest(x: Expr) -> tuple[Expr, Expr]:
    """The integer nearest to x, as f32 and as i32, for |x| < 2^22.

    Adding 1.5 * 2^23 leaves the integer in the low bits of the sum. There is no conversion, so NaN
    and infinities are not undefined (their integer is unused).
    """
    shifted = x + _MAGIC
    whole = shifted - _MAGIC
    return whole, bitcast(shifted, I32) - 0x4B400000


def _exp_parts(x: Expr) -> tuple[Expr, Expr]:
    """x = k ln2 + r with |r| <= ln2/2: r and the integer k, as f32."""
    k = fma(x, 1.0 / _LN2, _MAGIC) - _MAGIC  # the integer nearest to x / ln2, below 2^22
    r = fma(k, -_LN2_HIGH, x)
    return fma(k, -_LN2_LOW, r), k


def _exp_reduced(x: Expr) -> tuple[Expr, Expr]:
    """exp(x) = p 2^k for |x| < 2^21: p and k, as f32."""
    r, k = _exp_parts(x)
    return polynomial((1.0, 1.0, *c.EXP), r), k


def exp(x: Expr, shift: int = 0) -> Expr:
    """exp(x) * 2^shift, for a shift of at most 0."""
    # Above 89 the result is infinite through the scaling. Below -104 it is zero, but not through
    # it: an underflow takes CPUs ten times as long, and masks are -infinite.
    is_zero = x < -104.0
    p, k = _exp_reduced(where(x > 90.0, 90.0, where(is_zero, 0.0, x)))
    return where(is_zero, 0.0, scale(p, k + float(shift) if shift else k))


def exp2(x: Expr) -> Expr:
    """2^x."""
    is_zero = x < -150.0  # as for exp
    x = where(x > 129.0, 129.0, where(is_zero, 0.0, x))
    k = x + _MAGIC - _MAGIC
    return where(is_zero, 0.0, scale(polynomial((1.0, *c.EXP2), x - k), k))


def expm1(x: Expr) -> Expr:
    """exp(x) - 1, exact near zero."""
    # Below -18 the result rounds to -1. Half of 2^k stays finite where the result does.
    # Comparisons with NaN are false, so a NaN stays.
    r, k = _exp_parts(where(x < -18.0, -18.0, where(x > 89.0, 89.0, x)))
    p = fma(r * polynomial(c.EXPM1, r), r, r)
    half = scale(const(1.0, F32), k - 1.0)
    found = fma(half, p, half - 0.5) * 2.0
    return where(eq(x, 0.0), x, found)


def _log_parts(x: Expr) -> tuple[Expr, Expr]:
    """x = m * 2^e with 2/3 <= m < 4/3, for positive finite x: m - 1 and e as i32."""
    tiny = x < 2.0**-126
    bits = bitcast(where(tiny, x * 2.0**23, x), I32)
    # 0x3f2aaaab is 2/3: the exponent field carries exactly when the significand reaches 4/3.
    e = (bits - 0x3F2AAAAB) >> 23
    m = bitcast(bits - (e << 23), F32)
    return m - 1.0, where(tiny, e - 23, e)


def _log_ends(x: Expr, found: Expr) -> Expr:
    """Insert the values at and beyond the ends of the domain."""
    found = where(x < _INF, found, x)  # infinity and NaN
    found = where(eq(x, 0.0), -_INF, found)
    return where(x < 0.0, _NAN, found)


def _log_rest(f: Expr) -> Expr:
    """log(1 + f) / f - 1."""
    return f * fma(f, polynomial(c.LOG, f), -0.5)


def _log_sum(f: Expr, e: Expr) -> Expr:
    """log(1 + f) + e ln2. No product is smaller than f: f * f may be subnormal."""
    k = cast(e, F32)
    return fma(k, _LN2_HIGH, fma(f, _log_rest(f), fma(k, _LN2_LOW, f)))


def log(x: Expr) -> Expr:
    """The natural logarithm."""
    return _log_ends(x, _log_sum(*_log_parts(x)))


def log2(x: Expr) -> Expr:
    """The logarithm to base 2."""
    f, e = _log_parts(x)
    return _log_ends(x, _scaled_log(f, e, 1.0 / _LN2, 1.0, 0.0))


def log10(x: Expr) -> Expr:
    """The logarithm to base 10."""
    f, e = _log_parts(x)
    # log10(2) = high + low; the high part has 12 bits.
    high = 0.301025390625
    return _log_ends(x, _scaled_log(f, e, math.log10(math.e), high, math.log10(2.0) - high))


def _scaled_log(f: Expr, e: Expr, factor: float, high: float, low: float) -> Expr:
    """factor * log(1 + f) + e * (high + low), the factor in two parts of f32."""
    first = ctypes.c_float(factor).value  # the nearest f32
    tail, k = f * _log_rest(f), cast(e, F32)
    rest = fma(k, low, fma(tail, first, f * (factor - first)))
    # f * first without its rounding error, which would count twice if e is zero.
    return fma(k, high, fma(f, first, rest))


def log1p(x: Expr) -> Expr:
    """log(1 + x), exact near zero."""
    u = x + 1.0
    part = u - 1.0
    lost = 1.0 - (u - part) + (x - part)  # Knuth's TwoSum: u + lost = 1 + x
    f, e = _log_parts(u)
    found = _log_ends(u, _log_sum(f + scale(lost, 0 - e), e))
    return where(eq(x, 0.0), x, found)


def tanh(x: Expr) -> Expr:
    """The hyperbolic tangent: a polynomial near zero, an exponential beyond."""
    near = odd_polynomial(c.TANH, x)
    size = abs(x)
    far = 1.0 - 2.0 / (exp(size + size) + 1.0)
    return copysign(where(size < 0.65, near, far), x)  # near loses the sign of -0.0


def erf(x: Expr) -> Expr:
    """The error function."""
    size = abs(x)
    s = x * x
    near = fma(polynomial(c.ERF, s), x, x)
    y = where(size > 4.0, 4.0, size)  # erf(4) rounds to 1
    far = 1.0 - exp(-(y * polynomial(c.ERFC_LOG, y)))
    return where(size < 0.925, near, copysign(far, x))


def one_plus_erf(x: Expr) -> Expr:
    """1 + erf(x) to 1e-7 absolute: without the branch that erf needs for its digits near zero."""
    size = abs(x)
    y = where(size > 4.0, 4.0, size)
    p, k = _exp_reduced(-(y * polynomial(c.ERFC_LOG_ALL, y)))  # in [-18.1, 0]: no clamps
    tail = scale(p, k)
    below = where(x < -4.0, 0.0, tail)
    return where(x < 0.0, below, 2.0 - tail)


# pi in three parts: the first two are f32, so that fma subtracts k * pi to 72 bits.
_PI = (3.1415927410125732, -8.742277657347586e-08, -3.4302490200117637e-15)
# Beyond this the parts above no longer suffice.
_REDUCIBLE = 48000.0


def _minus_pi_times(x: Expr, k: Expr) -> Expr:
    for part in _PI:
        x = fma(k, -part, x)
    return x


def sin_reduced(r: Expr) -> Expr:
    """sin(r) for |r| <= pi/2."""
    return odd_polynomial(c.SIN, r)


def _sin_turned(r: Expr, k: Expr) -> Expr:
    """(-1)^k sin(r) for |r| <= pi/2."""
    found = sin_reduced(r)
    return bitcast(bitcast(found, I32) ^ (k << 31), F32)


def _beyond(x: Expr) -> Expr:
    return abs(x) > _REDUCIBLE


def sin(x: Expr) -> Expr:
    """The sine of an angle in radians."""
    whole, k = to_nearest(x * (1.0 / math.pi))
    found = _sin_turned(_minus_pi_times(x, whole), k)
    # x - 0 * pi only loses the sign of a negative zero.
    found = where(eq(x, 0.0), x, found)
    return or_libm("sin", _beyond(x), x, found)


def cos(x: Expr) -> Expr:
    """The cosine of an angle in radians."""
    # x = (k + 1/2) pi + r gives cos(x) = -(-1)^k sin(r).
    whole, k = to_nearest(fma(x, 1.0 / math.pi, -0.5))
    r = _minus_pi_times(x, whole + 0.5)
    return or_libm("cos", _beyond(x), x, _sin_turned(r, k + 1))


def tan(x: Expr) -> Expr:
    """The tangent of an angle in radians."""
    whole, k = to_nearest(x * (2.0 / math.pi))
    t = odd_polynomial(c.TAN, _minus_pi_times(x, whole * 0.5))
    odd = ne(k & 1, 0)
    found = where(eq(x, 0.0), x, where(odd, -1.0 / t, t))
    return or_libm("tan", _beyond(x), x, found)


# pi/2 in two parts of f32.
_HALF_PI = (1.5707963705062866, -4.371139000186243e-08)


def atan(x: Expr) -> Expr:
    """The inverse tangent, in radians."""
    size = abs(x)
    great = size > 1.0
    inner = odd_polynomial(c.ATAN, where(great, 1.0 / size, size))
    outer = _HALF_PI[0] - (inner - _HALF_PI[1])
    return copysign(where(great, outer, inner), x)


def atan2(y: Expr, x: Expr) -> Expr:
    """The angle of the point (x, y), in radians, between -pi and pi."""
    across, up = abs(x), abs(y)
    steep = up > across
    low, high = where(steep, across, up), where(steep, up, across)
    # For two zeros the ratio is 0, for two infinities 1 (C99 annex F).
    ratio = where(eq(high, 0.0), 0.0, low / high)
    ratio = where(eq(low, _INF), 1.0, ratio)
    angle = odd_polynomial(c.ATAN, ratio)
    angle = where(steep, _HALF_PI[0] - (angle - _HALF_PI[1]), angle)
    left = bitcast(x, I32) < 0
    turned = 2 * _HALF_PI[0] - (angle - 2 * _HALF_PI[1])
    found = copysign(where(left, turned, angle), y)
    # The comparisons above drop a NaN in either operand; the sum keeps it.
    return where(eq(x, x), where(eq(y, y), found, y), x)


def asin(x: Expr) -> Expr:
    """The inverse sine, in radians; NaN outside [-1, 1]."""
    size = abs(x)
    great = size > 0.5
    # asin(x) = pi/2 - 2 asin(sqrt((1 - x)/2)).
    root = sqrt(fma(size, -0.5, 0.5))
    inner = odd_polynomial(c.ASIN, where(great, root, size))
    outer = fma(inner, -2.0, _HALF_PI[1]) + _HALF_PI[0]
    return copysign(where(great, outer, inner), x)


def acos(x: Expr) -> Expr:
    """The inverse cosine, in radians; NaN outside [-1, 1]."""
    size = abs(x)
    great = size > 0.5
    root = sqrt(fma(size, -0.5, 0.5))
    inner = odd_polynomial(c.ASIN, where(great, root, x))
    twice = inner + inner
    pi = 2 * _HALF_PI[0] - (twice - 2 * _HALF_PI[1])
    middle = _HALF_PI[0] - (inner - _HALF_PI[1])
    return where(great, where(x < 0.0, pi, twice), middle)


def cosh(x: Expr) -> Expr:
    """The hyperbolic cosine."""
    half = exp(abs(x), shift=-1)
    return half + 0.25 / half


def asinh(x: Expr) -> Expr:
    """The inverse hyperbolic sine."""
    size = abs(x)
    great = size > 2.0**13
    y = where(great, 1.0, size)
    s = y * y
    # asinh(y) = log1p(y + y^2 / (1 + sqrt(1 + y^2))); for large y it is log(2 y).
    near = log1p(y + s / (1.0 + sqrt(s + 1.0)))
    far = log(where(great, size, 1.0)) + _LN2
    found = where(great, far, near)
    return copysign(where(eq(x, x), found, x), x)


def acosh(x: Expr) -> Expr:
    """The inverse hyperbolic cosine; NaN below 1."""
    great = x > 2.0**13
    t = where(great, 2.0, x) - 1.0
    near = log1p(t + sqrt(fma(t, t, t + t)))
    far = log(where(great, x, 1.0)) + _LN2
    return where(x < 1.0, _NAN, where(great, far, near))


def atanh(x: Expr) -> Expr:
    """The inverse hyperbolic tangent; infinite at 1 and -1, NaN beyond."""
    size = abs(x)
    # atanh(y) = log1p(2 y / (1 - y)) / 2.
    found = log1p((size + size) / (1.0 - size)) * 0.5
    found = where(ge(1.0, size), found, _NAN)
    return copysign(found, x)


def log2_wide(x: Expr) -> Expr:
    """log2 of a positive normal f64, to 2^-43 of the result."""
    bits = bitcast(x, I64)
    # The bits of sqrt(1/2): the exponent field carries when the significand passes sqrt(2).
    e = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = bitcast(bits - (e << 52), F64)
    t = (m - 1.0) / (m + 1.0)
    return fma(t, polynomial(c.LOG2_F64, square(t)), cast(e, F64))


def exp2_wide(x: Expr) -> Expr:
    """2^x of an f64 with |x| <= 1000, to 2^-34 of the result."""
    shifted = x + _WIDE_MAGIC
    r = x - (shifted - _WIDE_MAGIC)
    # The low bits of the sum are the integer; the shift drops the others.
    power = bitcast((bitcast(shifted, I64) + 1023) << 52, F64)
    return fma(polynomial(c.EXP2_F64, r), r, 1.0) * power


def erfc(x: Expr) -> Expr:
    """1 - erf(x), without loss of digits for large x. In f64: exp(-x^2) multiplies its error."""
    y = cast(where(abs(x) > 11.0, 11.0, abs(x)), F64)  # erfc(11) rounds to zero
    # erfc(y) = exp(-y^2) p(u) / (1 + 2 y), u = (y - 4) / (y + 4), after Schonfelder (1978).
    scaled = polynomial(c.ERFCX, (y - 4.0) / (y + 4.0)) / fma(y, 2.0, 1.0)
    found = exp2_wide(y * y * (-1.0 / _LN2)) * scaled
    return cast(where(x < 0.0, 2.0 - found, found), F32)


def erfinv(x: Expr) -> Expr:
    """The inverse of erf; infinite at 1 and -1, NaN beyond (form after Giles 2012), in f64."""
    wide = cast(x, F64)
    w = log2_wide(fma(-wide, wide, 1.0)) * -_LN2
    near = polynomial(c.ERFINV_NEAR, w - 2.5)
    far = polynomial(c.ERFINV_FAR, sqrt(where(w < 5.0, 5.0, w)) - 3.0)
    found = cast(where(w < 5.0, near, far) * wide, F32)
    return where(abs(x) < 1.0, found, where(eq(abs(x), 1.0), x * _INF, _NAN))
