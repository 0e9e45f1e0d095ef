"""Powers: pow of floats and integers, and hypot."""

from __future__ import annotations

import math

import torch

from lenz.ir.dtype import F32, F64
from lenz.ir.expr import Expr, const
from lenz.ir.op import Op
from lenz.ops import poly
from lenz.ops.arith import abs as magnitude
from lenz.ops.arith import floor, fma, reciprocal, sqrt, square
from lenz.ops.cast import cast
from lenz.ops.compare import eq, isinf, isnan, ne, signbit, where
from lenz.ops.emission import library
from lenz.ops.fold import apply, binary, is_const, value_of
from lenz.ops.rules import FLOATS, INTS, float_op, same

_INF = float("inf")


def _expand_pow(x: Expr, y: Expr) -> Expr:
    """|x|^y = 2^(y log2 |x|) in f64, with the special values of C99 annex F."""
    if x.dtype.is_integer:
        return _expand_integer_pow(x, y)
    size = magnitude(x)
    wide = cast(size, F64)
    exponent = where(eq(size, 0.0), -_INF, poly.log2_wide(wide))
    exponent = where(isinf(size), _INF, exponent)
    z = cast(y, F64) * exponent
    # 1^y is 1 also for infinite y, where the product is NaN. The limits are beyond f32's range.
    z = where(eq(size, 1.0), 0.0, z)
    z = where(z > 200.0, 200.0, z)
    z = where(z < -200.0, -200.0, z)
    found = cast(poly.exp2_wide(z), F32)
    whole = eq(floor(y), y)
    odd = whole & ne(floor(y * 0.5), y * 0.5)
    bad = ((x < 0.0) & ~whole & ~isinf(x)) | (isnan(x) | isnan(y))
    found = where(bad, math.nan, where(odd & signbit(x), -found, found))
    return where(eq(x, 1.0) | eq(y, 0.0), 1.0, found)


def _expand_integer_pow(x: Expr, y: Expr) -> Expr:
    """Square and multiply over the low bits of the exponent, a series for the others; wraps.

    The squares of an odd x are 1 + w, where w is a multiple of 8 after one square, of 16 after two,
    and so on, until w^4 is 0. Then (1 + w)^n = 1 + n w + n(n-1)/2 w^2 + n(n-1)(n-2)/6 w^3. Those of
    an even x are 0 by then. 1.1M i64 take a third of the time of a step per bit.
    """
    one = const(1, x.dtype)
    squares = max(x.dtype.bits // 4 - 2, 4)
    total, power = one, x
    for k in range(squares):
        total = where(eq((y >> k) & one, 0), total, total * power)
        power = square(power)
    n, w = y >> squares, power - one
    # An exact half of one factor, and the inverse of 3: the quotients are exact though they wrap.
    pairs = where(eq(n & one, 0), (n >> 1) * (n - one), n * (n >> 1))
    triples = pairs * (n - 2) * const(((2 << x.dtype.bits) + 1) // 3, x.dtype)
    total = total * (one + w * (n + w * (pairs + w * triples)))
    total = where(eq(n, 0) | eq(x & one, one), total, 0)
    # With a negative exponent only 1 and -1 give an integer; torch gives 0 for other bases.
    below = where(eq(magnitude(x), one), where(eq(y & one, 0), one, x), 0)
    return where(y < 0, below, total)


def _expand_hypot(x: Expr, y: Expr) -> Expr:
    """sqrt(x^2 + y^2) in f64, where no square of an f32 overflows; infinite if either is."""
    a, b = cast(x, F64), cast(y, F64)
    found = cast(sqrt(fma(a, a, square(b))), F32)
    return where(isinf(x) | isinf(y), _INF, found)


# Integer types for which torch has a power.
_POWER_TYPES = tuple(d for d in INTS if d.name not in ("u16", "u32", "u64")) + FLOATS
POW = Op(
    "pow",
    2,
    same(_POWER_TYPES),
    torch.pow,
    expand=_expand_pow,
    forms=library("pow", 2, (F64,), FLOATS, ulp=4.0),  # in f64: 1.8 times as long on an H100
    cost=60.0,
    domain=((0.0, 20.0), (-20.0, 20.0)),
    ulp=1.0,
)
HYPOT = float_op(
    "hypot",
    2,
    expand=_expand_hypot,
    forms=library("hypot", 2, (F64,), FLOATS, ulp=3.0),
    aten=("hypot",),
    commutes=True,
    cost=16.0,
    ulp=1.0,
)
# Integer exponents up to this take at most 5 products, with an error below 4 ulp.
_MOST_PRODUCTS = 16


def pow(x: Expr, y: Expr) -> Expr:
    """x to the power y; small constant exponents become products and roots.

    Integers wrap, and a negative exponent gives 0 except for the bases 1 and -1.
    """
    value = value_of(y)
    if value is None or is_const(x):
        return apply(POW, x, y)
    if value == 0:
        return const(1, x.dtype)
    if value == int(value) if math.isfinite(value) else False:
        if 0 < value <= _MOST_PRODUCTS:
            return _product(x, int(value))
        if x.dtype.is_float and value in (-1.0, -2.0):
            return reciprocal(_product(x, -int(value)))
    return _root(x, value) if x.dtype.is_float else apply(POW, x, y)


def _product(x: Expr, n: int) -> Expr:
    if n == 1:
        return x
    half = square(_product(x, n // 2))
    return half * x if n % 2 else half


def _root(x: Expr, value: float) -> Expr:
    # pow(-0.0, 0.5) is 0.0 and pow(-inf, 0.5) is inf, where sqrt gives -0.0 and NaN.
    if value not in (0.5, -0.5):
        return apply(POW, x, const(value, x.dtype))
    low = eq(x, -_INF)
    root = where(low, _INF, sqrt(x + 0.0))
    return root if value > 0 else reciprocal(root)


hypot = binary(HYPOT, "sqrt(x^2 + y^2) without intermediate overflow.")
