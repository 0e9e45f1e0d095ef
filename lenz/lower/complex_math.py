"""Formulas of complex numbers on pairs of real expressions, as eager computes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lenz import ops
from lenz.ir.expr import Expr, const
from lenz.ir.tensor import contiguous
from lenz.lower.arithmetic import short_powers
from lenz.lower.builder import Decline, Fn, GraphBuilder, Value, giving
from lenz.lower.complex import PARTS, Complex, Pair, elementwise, interleaved, rule, view_as_complex
from lenz.lower.dims import count, cut
from lenz.lower.operand import element
from lenz.lower.reduce import Dim, accumulate
from lenz.lower.registry import lowering
from lenz.machines import runs_programs
from lenz.sym import ONE


def mul(x: Pair, y: Pair) -> Pair:
    """(a + bi) (c + di) = ac - bd + (ad + bc)i, for infinities too."""
    (a, b), (c, d) = x, y
    return a * c - b * d, a * d + b * c


def div(x: Pair, y: Pair) -> Pair:
    """x / y by R. L. Smith's algorithm (1962), which scales by the larger part of the divisor.

    With r = d / c, (a + bi) / (c + di) is (a + br + (b - ar)i) / (c + dr) where |c| >= |d|, and
    with the parts exchanged otherwise. A division by zero divides both parts by it.
    """
    (a, b), (c, d) = x, y
    wide = abs(c) >= abs(d)
    zero = ops.eq(c, 0.0) & ops.eq(d, 0.0)
    large, small = _choose(wide, (c, d), (d, c))
    p, q = _choose(wide, (a, b), (b, a))
    r = small / large
    scale = ops.reciprocal(large + small * r)
    im = q - p * r
    im = ops.where(wide, im, -im)
    found = (p + q * r) * scale, im * scale
    return _choose(zero, (a / abs(c), b / abs(c)), found)


def exp(z: Pair) -> Pair:
    """e^a (cos b + i sin b); a real number stays real, and e^-inf is 0."""
    (a, b) = z
    e, gone = ops.exp(a), ops.eq(a, -math.inf)
    re = ops.where(gone, 0.0, e * ops.cos(b))
    im = ops.where(gone, 0.0, e * ops.sin(b))
    return re, ops.where(ops.eq(b, 0.0), b, im)


def log(z: Pair) -> Pair:
    """ln |z| and the angle, from -pi to pi."""
    return ops.log(ops.hypot(*z)), ops.atan2(z[1], z[0])


def sqrt(z: Pair) -> Pair:
    """The root with a real part >= 0: t = sqrt((|a| + |z|) / 2) and |b| / 2t, in either order."""
    (a, b) = z
    t = ops.sqrt(abs(a) * 0.5 + ops.hypot(a, b) * 0.5)
    other = ops.where(ops.eq(t, 0.0), t, abs(b) * 0.5 / t)
    t, other = _choose(ops.isinf(b), (abs(b), abs(b)), (t, other))
    re, im = _choose(a >= 0.0, (t, other), (other, t))
    return re, ops.copysign(im, b)


def sgn(z: Pair) -> Pair:
    """z / |z|, and 0 for 0."""
    size = ops.hypot(*z)
    zero = const(0.0, size.dtype)
    return _choose(ops.eq(size, 0.0), (zero, zero), (z[0] / size, z[1] / size))


def power(x: Pair, y: Pair) -> Pair:
    """x^y: products for small whole y, else e^(y ln x), where 0^0 = 1 and else 0^y = 0."""
    one, zero = const(1.0, x[0].dtype), const(0.0, x[0].dtype)
    forms: dict[Any, Callable[[Pair], Pair]] = short_powers(mul, sqrt, reciprocal)
    c, d = map(ops.value_of, y)
    if d == 0 and c in forms:
        return forms[c](x)
    of_zero = ops.where(ops.eq(y[0], 0.0) & ops.eq(y[1], 0.0), one, zero)
    nothing = ops.eq(x[0], 0.0) & ops.eq(x[1], 0.0)
    return _choose(nothing, (of_zero, zero), exp(mul(y, log(x))))


def _hyperbolic(z: Pair, even: Fn, odd: Fn) -> Pair:
    """even(a) cos b + i odd(a) sin b; a real number stays real."""
    (a, b) = z
    return even(a) * ops.cos(b), ops.where(ops.eq(b, 0.0), b, odd(a) * ops.sin(b))


def sinh(z: Pair) -> Pair:
    """sinh a cos b + i cosh a sin b; i sin z is sinh iz."""
    return _hyperbolic(z, ops.sinh, ops.cosh)


def cosh(z: Pair) -> Pair:
    """cosh a cos b + i sinh a sin b; cos z is cosh iz."""
    return _hyperbolic(z, ops.cosh, ops.sinh)


def reciprocal(z: Pair) -> Pair:
    """1 / z."""
    return div((const(1.0, z[0].dtype), const(0.0, z[0].dtype)), z)


def _choose(cond: Expr, x: Pair, y: Pair) -> Pair:
    return ops.where(cond, x[0], y[0]), ops.where(cond, x[1], y[1])


def _is_equal(x: Pair, y: Pair) -> Expr:
    return ops.eq(x[0], y[0]) & ops.eq(x[1], y[1])


def _scaled(z: Pair, by: float) -> Pair:
    return z[0] * by, z[1] * by


def _turned(z: Pair) -> Pair:
    return -z[1], z[0]


def _sum(x: Pair, y: Pair, z: Pair, factor: Pair) -> Pair:
    p = mul(mul(factor, y), z)
    return x[0] + p[0], x[1] + p[1]


_FORMULAS: dict[str, Callable[..., Any]] = {
    "mul multiply": mul,
    "div divide true_divide": div,
    "reciprocal": reciprocal,
    "exp": exp,
    "log": log,
    "log2": lambda z: _scaled(log(z), 1 / math.log(2)),
    "log10": lambda z: _scaled(log(z), 1 / math.log(10)),
    "sqrt": sqrt,
    "rsqrt": lambda z: reciprocal(sqrt(z)),
    "square": lambda z: mul(z, z),
    "pow": power,
    "sgn": sgn,
    "cosh": cosh,
    "sinh": sinh,
    "cos": lambda z: cosh(_turned(z)),
    "sin": lambda z: _turned(_scaled(sinh(_turned(z)), -1.0)),
    "abs absolute": lambda z: ops.hypot(*z),
    "angle": lambda z: ops.atan2(z[1], z[0]),
    "eq": _is_equal,
    "ne not_equal": lambda x, y: ~_is_equal(x, y),
    "isnan": lambda z: ops.isnan(z[0]) | ops.isnan(z[1]),
    "isinf": lambda z: ops.isinf(z[0]) | ops.isinf(z[1]),
    "isfinite": lambda z: ops.isfinite(z[0]) & ops.isfinite(z[1]),
    "_conj_physical": lambda z: (z[0], -z[1]),
}
for _names, _formula in _FORMULAS.items():
    rule(*_names.split())(elementwise(_formula))


@rule("addcmul")
def addcmul(b: GraphBuilder, x: Any, y: Any, z: Any, *, value: Any = 1) -> Any:
    """x + value y z."""
    return elementwise(_sum)(b, x, y, z, value)


@rule("mean")
def mean(b: GraphBuilder, z: Any, dim: Dim = None, keepdim: bool = False, **_: Any) -> Complex:
    """The sum divided by the number of elements, which is a complex number on CPUs."""
    if not isinstance(z, Complex) or b.result.dtype not in PARTS:
        raise Decline("a mean of real numbers in a complex type, or of complex ones in a real type")
    real = PARTS[b.result.dtype]
    n = count(cut(z.shape, dim).over, real)
    finish = (lambda total: total / n) if runs_programs(z.device) else None
    total = _total(b, z, dim, keepdim, finish)
    return total if finish else elementwise(lambda z: div(z, (n, const(0, real))))(b, total)


@rule("sum")
def sum_(b: GraphBuilder, z: Any, dim: Dim = None, keepdim: bool = False, **_: Any) -> Any:
    """Sums of both parts; a real result is the sum of the real parts."""
    if isinstance(z, Complex) and b.result.dtype in PARTS:
        return _total(b, z, dim, keepdim, None)
    if isinstance(z, Complex):
        return accumulate(b, "sum", z.parts[0], dim, keepdim)
    zero = b.map(lambda i: const(0, z.dtype), b.temp(z.shape, z.dtype, z))
    both = Complex(b, replace(b.result, layout=contiguous(z.shape)), parts=lambda: (z, zero))
    return _total(b, both, dim, keepdim, None)


def _total(b: GraphBuilder, z: Complex, dim: Dim, keepdim: bool, finish: Fn | None) -> Complex:
    """Sums of both parts, as the columns of one sum if these are contiguous in memory.

    10^6 numbers take 0.06 ms so, and 0.22 as two sums of every other element.
    """
    type, over = replace(b.result, dtype=PARTS[b.result.dtype]), cut(z.shape, dim).reduced
    stride = z.type.layout.stride
    rows = len(over) < z.rank and any(stride[d] is ONE for d in over)
    if over and not rows and z.memory is not None:
        add = partial(accumulate, b, "sum", z.pair, over, keepdim, finish)
        made: Value = giving(b, (replace(type, layout=interleaved(type.layout)),), add)
        return view_as_complex(b, made)
    sums = [
        giving(b, (type,), partial(accumulate, b, "sum", x, dim, keepdim, finish)) for x in z.parts
    ]
    return Complex(b, b.result, parts=lambda: (sums[0], sums[1]))


def _of_reals(name: str, fn: Callable[[Expr, Expr], Pair]) -> None:
    made = elementwise(lambda x, y: fn(x[0], y[0]))
    lowering(name)(rule(name)(lambda b, x, y: made(b, x, y)))


_of_reals("complex", lambda re, im: (re, im))
_of_reals("polar", lambda r, phi: (r * ops.cos(phi), r * ops.sin(phi)))


# Imaginary parts of a conjugate, which eager only flags as negated.
lowering("_neg_view")(lambda b, x: b.map(lambda i: -element(x, i, x.dtype)))
