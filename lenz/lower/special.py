"""torch.special: digamma and its derivatives, Bessel and Airy functions, erfcx, ndtri, Chebyshev.

Tables are Chebyshev coefficients of the function in the comment above, fitted by us with 30 digits
and truncated where the rest is below 3e-9. They are for f32; doubles are called in eager. The
formulas are those of the NIST Handbook of Mathematical Functions (DLMF), whose sections are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

from lenz import ops
from lenz.ir.dtype import F32, F64, I64, compute_dtype
from lenz.ir.expr import Expr, const
from lenz.ir.op import op_named
from lenz.lower.builder import Decline, Fn, GraphBuilder, Index, Value
from lenz.lower.operand import Operand, element
from lenz.lower.registry import lowering

# exp(-x) I0(x) on [0, 8]; exp(-x) sqrt(x) I0(x) of 1/x on [0, 1/8]; the same for I1, first over x.
I0_LOW = (0.3383976372, -0.3046826723, 0.1716209015, -0.09490109705, 0.04930528424, -0.02373741481,
          0.01054646039, -0.004324309995, 0.001639475617, -0.0005763755745, 0.0001885028851,
          -5.75419501e-5, 1.644844807e-5, -4.416738358e-6, 1.117387539e-6, -2.670793854e-7,
          6.046995023e-8, -1.30002501e-8, 2.659823725e-9)  # fmt: skip
I0_HIGH = (0.4022452055, 0.003369116478, 6.889758347e-5, 2.891370521e-6, 2.048918589e-7,
           2.26666899e-8, 3.396232026e-9)  # fmt: skip
I1_LOW = (0.1262935932, -0.1764165184, 0.1026436587, -0.05294598121, 0.02472644903, -0.01056408489,
          0.004156422944, -0.001513572451, 0.0005122859562, -0.0001617608158, 4.781565108e-5,
          -1.327316366e-5, 3.470251308e-6, -8.568720265e-7, 2.003294754e-7, -4.445059129e-8,
          9.381537386e-9, -1.887249752e-9)  # fmt: skip
I1_HIGH = (0.3892881175, -0.009761097491, -0.0001105889388, -3.882564809e-6, -2.512236238e-7,
           -2.631468847e-8, -3.835380386e-9)  # fmt: skip
# K0(x) + log(x/2) I0(x) of x^2 on [0, 4]; exp(x) sqrt(x) K0(x) of 1/x on [0, 1/2].
K0_LOW = (-0.2676636966, 0.3442898999, 0.03597993652, 0.001264615411, 2.286212103e-5,
          2.534791079e-7, 1.904516377e-9)  # fmt: skip
K0_HIGH = (1.220151541, -0.03144810131, 0.001569883886, -0.0001284954958, 1.394981372e-5,
           -1.831755523e-6, 2.766813639e-7, -4.660489898e-8, 8.574034017e-9)  # fmt: skip
# x (K1(x) - log(x/2) I1(x)) of x^2 on [0, 4]; exp(x) sqrt(x) K1(x) of 1/x on [0, 1/2].
K1_LOW = (0.7626501137, -0.3531559608, -0.1226111808, -0.00697572386, -0.0001730288958,
          -2.433406142e-6, -2.213387631e-8)  # fmt: skip
K1_HIGH = (1.360313095, 0.1039237366, -0.00285781686, 0.0001952155185, -1.936197974e-5,
           2.406484948e-6, -3.501960603e-7, 5.741084125e-8, -1.034576247e-8)  # fmt: skip
# (1 + 2 x) exp(x^2) erfc(x) of (x - 3)/(x + 3) on [-1, 1].
ERFCX = (1.177562574, 0.00535390454, -0.09377550342, 0.05436652556, -0.01897659671,
         0.004453426061, -0.0006335531711, 1.766171952e-5, 1.284153287e-5, -2.007228555e-6,
         -1.807522679e-7, 7.549829059e-8)  # fmt: skip
# s (z - s + log(s)/s) of 1/s on [1/15, 1/1.6], where the normal distribution at -z is exp(-s^2/2).
NDTRI = (-1.044087408, -0.1062851709, 0.002018475579, 0.0004324566427, -0.0002666065917,
         0.0001155338035, -4.41952848e-5, 1.596436299e-5, -5.69211115e-6, 2.060893307e-6,
         -7.679474352e-7, 2.950737233e-7, -1.164333382e-7, 4.692989595e-8)  # fmt: skip
# J0(x) over its first factor x^2 - zero^2, J1(x)/x over its own; Y0(x) - (2/pi) log(x) J0(x);
# (Y1(x) - (2/pi) (log(x) J1(x) - 1/x)) / x: all of x^2 on [0, 25].
J0_LOW = (-0.07405174056, 0.07995724165, -0.01689860151, 0.00187349932, -0.0001278633421,
          5.919230226e-6, -1.982793701e-7, 5.032513126e-9)  # fmt: skip
J1_LOW = (-0.0180284158, 0.01366148708, -0.002163265156, 0.0001909490104, -1.081617474e-5,
          4.278886056e-7, -1.251337564e-8, 2.818348884e-10)  # fmt: skip
Y0_LOW = (0.2060525763, -0.1301752238, -0.2918947209, 0.1026828797, -0.0142791599, 0.001116462986,
          -5.677525113e-5, 2.040670366e-6, -5.47643103e-8)  # fmt: skip
Y1_LOW = (0.05310744506, 0.1418945089, -0.08834328868, 0.01711110993, -0.001705785257,
          0.0001052575303, -4.445075266e-6, 1.369927767e-7, -3.222883768e-9)  # fmt: skip
# First zeros, each as the nearest f32 and the remainder.
ZEROS = ((2.404825448989868, 1.087059e-7), (3.8317060470581055, -7.6850593e-8))
# Amplitudes P and x Q of 1/x^2 on [0, 1/25] (DLMF 10.18), for orders 0 and 1.
P = ((0.9986523399, -0.001329371621, 1.761305551e-5, -6.319367119e-7, 3.948825587e-8),
     (1.002267621, 0.002243735296, -2.307101886e-5, 7.639181733e-7, -4.589685232e-8))  # fmt: skip
Q = ((-0.1236470258, 0.001319019405, -3.218799121e-5, 1.623709321e-6, -1.274328974e-7,
      1.351303276e-8),
     (0.3730873462, -0.001870518968, 4.005699452e-5, -1.914402839e-6, 1.458816511e-7,
      -1.518339864e-8))  # fmt: skip
# Ai(x) on [-2, 2]; with z = 2/3 |x|^1.5 (DLMF 9.7): 2 sqrt(pi) x^(1/4) exp(z) Ai(x) of 1/z, and the
# amplitudes of sin and of -cos/z in sqrt(pi) |x|^(1/4) Ai(-|x|) of 1/z^2.
AI_MID = (0.2638179819, -0.1917674578, -0.1154458786, 0.1012922987, -0.02063422536,
          -0.005263460236, 0.003521327342, -0.0005522127136, -8.722346961e-5, 4.99721553e-5,
          -6.58209617e-6, -7.465940981e-7, 3.837100505e-7, -4.427726203e-8)  # fmt: skip
AI_HIGH = (0.9844053049, -0.01479278485, 0.0007327177465, -6.125954234e-5, 6.834766976e-6,
           -9.237229735e-7, 1.43622534e-7, -2.489319422e-8, 4.70979344e-9)  # fmt: skip
AI_SIN = (0.9957410715, -0.00401003511, 0.0002174979785, -2.559707368e-5, 4.446236507e-6,
          -9.821561055e-7, 2.560803263e-7, -7.548234203e-8, 2.447213482e-8)  # fmt: skip
AI_COS = (0.06570090884, -0.003367165046, 0.0003131866831, -4.909474711e-5, 1.031385323e-5,
          -2.622703144e-6, 7.642834031e-7, -2.469218211e-7, 8.654323471e-8)  # fmt: skip
AI_END = 0.53033008589  # 1/z of x = 2
# The Bernoulli numbers B(2), B(4), ...
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)


def series(table: Sequence[float], x: Expr, low: float, high: float) -> Expr:
    """sum of table[k] T_k(t) by Clenshaw's recurrence; t maps x in [low, high] to [-1, 1]."""
    t = ops.fma(x, 2 / (high - low), -(high + low) / (high - low))
    twice, last, before = t + t, const(0.0, x.dtype), const(0.0, x.dtype)
    for k in reversed(table[1:]):
        last, before = ops.fma(twice, last, k - before), last
    return ops.fma(t, last, table[0] - before)


def _enter(fn: Fn, *names: str, doubles: bool = False) -> None:
    """Register a function for f32, or also for f64."""

    def lower_special(b: GraphBuilder, x: Value) -> Value:
        if not doubles and b.result.dtype is F64:
            raise Decline("a special function of doubles")
        return b.map(lambda i: fn(element(x, i, b.result.dtype)))

    lowering(*names)(lower_special)


def _power(e: Expr, n: int) -> Expr:
    return reduce(ops.mul, [e] * n)


def _cotangent(x: Expr) -> tuple[Expr, Expr]:
    """cot(pi x), and whether x is an integer: a pole."""
    r = x - ops.round(x)
    # Beyond 1/4 it is the tangent of the distance to 1/2, where its zero is.
    far = abs(r) > 0.25
    t = ops.where(far, ops.copysign(0.5 - abs(r), r), r)
    tan = ops.tan(t * math.pi)
    return ops.where(far, tan, ops.reciprocal(tan)), ops.eq(r, 0.0)


def digamma(x: Expr) -> Expr:
    """The logarithmic derivative of gamma, by reflection, recurrence, series (DLMF 5.5, 5.11)."""
    steps, terms = (6, 3) if x.dtype is F32 else (10, 7)
    below = x < 0.0
    y = ops.where(below, 1.0 - x, x)
    w = y + float(steps)
    square = ops.reciprocal(ops.square(w))
    tail = const(0.0, x.dtype)
    for k in reversed(range(terms)):
        tail = square * (tail + BERNOULLI[k] / (2 * k + 2))
    found = ops.log(w) - 0.5 / w - tail - ops.reciprocal(y)  # the last keeps the sign of a zero
    for k in range(1, steps):
        found = found - ops.reciprocal(y + float(k))
    cot, pole = _cotangent(x)
    return ops.where(below, ops.where(pole, math.nan, found - cot * math.pi), found)


def polygamma(x: Expr, n: int) -> Expr:
    """The n-th derivative of digamma: (-1)^(n+1) n! zeta(n + 1, x) by Euler and Maclaurin."""
    if n == 0:
        return digamma(x)
    steps, terms = (6 + n, 4) if x.dtype is F32 else (10 + n, 7)
    below = x < 0.0
    y = ops.where(below, 1.0 - x, x)
    w = ops.reciprocal(y + float(steps))
    high = _power(w, n)
    tail = high * (1 / n) + high * w * 0.5
    part = high * w
    for k in range(terms):
        part = part * w
        rising = math.prod(range(n + 1, n + 2 * k + 2)) / math.factorial(2 * k + 2)
        tail = tail + part * (BERNOULLI[k] * rising)
        part = part * w
    for k in reversed(range(steps)):  # from the smallest to the largest
        tail = tail + _power(ops.reciprocal(y + float(k)), n + 1)
    sign = -1.0 if n % 2 == 0 else 1.0
    found = tail * (sign * math.factorial(n))
    # cot' = -(1 + cot^2), so derivatives of cot are polynomials in cot, lowest power first.
    p = [0.0, 1.0]
    for _ in range(n):
        slope = [k * a for k, a in enumerate(p)][1:]
        p = [-a - b for a, b in zip([*slope, 0.0, 0.0], [0.0, 0.0, *slope], strict=True)]
    cot, pole = _cotangent(x)
    bent = const(p[-1], x.dtype)
    for a in reversed(p[:-1]):
        bent = bent * cot + a
    mirrored = found * -sign - bent * math.pi ** (n + 1)
    if n > 1:  # eager's, by zeta: NaN at infinity, and -infinity is a whole number
        found, pole = found + (x - x), ops.eq(x, ops.floor(x))
    mirrored = ops.where(pole, sign * math.inf, mirrored)
    return ops.where(below, mirrored, found)


def _zeta(x: Expr, q: Expr) -> Expr:
    """sum of (q + k)^-x over k >= 0, for x > 1 and q > 0 (DLMF 25.11.28): some terms, the rest by
    Euler and Maclaurin's formula, whose terms decrease with x / (2 pi (q + steps))."""
    steps, terms = 5, 4  # of f32
    power, down = op_named("pow"), -x
    a = q + float(steps)
    w, high = ops.reciprocal(a), ops.apply(power, a, 1.0 - x)
    part = high * w
    tail = ops.fma(part, 0.5, high / (x - 1.0))
    rising = ops.minimum(x, 1e8)  # beyond, its factors are all 0
    part = part * rising * w
    for k in range(terms):
        tail = ops.fma(part, BERNOULLI[k] / math.factorial(2 * k + 2), tail)
        for n in (2 * k + 1, 2 * k + 2):
            part = part * ((rising + float(n)) * w)
    for k in reversed(range(steps)):
        tail = tail + ops.apply(power, q + float(k), down)
    return tail


def zeta(x: Expr, q: Expr, device: str) -> Expr:
    """Hurwitz' zeta function; below q = 0 terms are mirrored, which needs an integer x."""
    below, whole = q < 0.0, ops.eq(x, ops.floor(x))
    rest = q - ops.floor(q)
    found = _zeta(x, ops.where(below, rest, q))
    # With rest - j in place of q + k, where 0 < j <= -floor(q). Odd powers cancel, all at 1/2.
    half, near, far = x * 0.5, _zeta(x, 1.0 - rest), _zeta(x, 1.0 - q)
    even = found + near - far
    odd = found - near + far
    mirrored = ops.where(ops.eq(half, ops.floor(half)), even, odd)
    mirrored = ops.where(whole, mirrored, math.nan)
    # If all terms are 0, eager's last corrections may be infinity times 0: it has products of 23
    # factors from x on, in f32 on GPUs and in f64 on CPUs.
    most = 2.4e13 if device == "cpu" else 36.0
    lost = ops.eq(ops.apply(op_named("pow"), q, -x), 0.0) & ((x > most) | (q > 3e38))
    found = ops.where(lost, math.nan, found)
    pole = (q <= 0.0) & ops.eq(q, ops.floor(q))
    found = ops.where(pole, math.inf, ops.where(below, mirrored, found))
    found = ops.where(ops.eq(x, 1.0), math.inf, found)
    return ops.where(x < 1.0, math.nan, found)


@lowering("special_zeta")
def lower_zeta(b: GraphBuilder, x: Operand, q: Operand) -> Value:
    """Hurwitz' zeta function of two tensors, or of a tensor and a number."""
    t = b.result.dtype
    if t is F64:
        raise Decline("in doubles, where eager skips terms and takes 0.5 of the time")
    return b.map(lambda i: zeta(element(x, i, t), element(q, i, t), b.result.device))


@lowering("polygamma", "special_polygamma")
def lower_polygamma(b: GraphBuilder, n: int, x: Value) -> Value:
    """Derivatives of digamma, of a known order."""
    if not 0 <= n <= 12:
        raise Decline("a polygamma function of high order")
    t = compute_dtype(b.result.dtype)
    # From the second order on eager computes f32 in doubles on CPUs: 8e-8 off, and f32 alone 4e-7.
    wide = F64 if n > 1 and b.result.device == "cpu" else t
    return b.map(lambda i: ops.cast(polygamma(ops.cast(element(x, i, t), wide), n), t))


def _scaled_i(order: int) -> Fn:
    """exp(-|x|) I(x)."""

    def fn(x: Expr) -> Expr:
        a = abs(x)
        low = series(I1_LOW if order else I0_LOW, a, 0.0, 8.0)
        u = ops.reciprocal(a)
        high = series(I1_HIGH if order else I0_HIGH, u, 0.0, 1 / 8) * ops.sqrt(u)
        if order:
            low, high = low * x, ops.copysign(high, x)
        return ops.where(a <= 8.0, low, high)

    return fn


def _i(order: int) -> Fn:
    return lambda x: ops.exp(abs(x)) * _scaled_i(order)(x)


def _k(order: int, scaled: bool) -> Fn:
    """K(x), or exp(x) K(x)."""

    def fn(x: Expr) -> Expr:
        u = ops.reciprocal(x)
        log = ops.log(x * 0.5) * _i(order)(x)
        if order:
            low = ops.fma(series(K1_LOW, ops.square(x), 0.0, 4.0), u, log)
        else:
            low = series(K0_LOW, ops.square(x), 0.0, 4.0) - log
        high = series(K1_HIGH if order else K0_HIGH, u, 0.0, 0.5) * ops.sqrt(u)
        low = low * ops.exp(x) if scaled else low
        high = high if scaled else high * ops.exp(-x)
        found = ops.where(x <= 2.0, low, high)
        found = ops.where(ops.eq(x, 0.0), math.inf, found)
        return ops.where(x < 0.0, math.nan, found)

    return fn


def _bessel(order: int, second: bool) -> Fn:
    """J(x), or Y(x)."""

    def low_j(x: Expr) -> Expr:
        near, rest = ZEROS[order]
        e = series(J1_LOW if order else J0_LOW, ops.square(x), 0.0, 25.0)
        e = e * ((x - near - rest) * (x + near))
        return e * x if order else e

    def fn(x: Expr) -> Expr:
        a = abs(x)
        low = low_j(a)
        if second:
            log = ops.log(a) * low
            rest = series(Y1_LOW if order else Y0_LOW, ops.square(a), 0.0, 25.0)
            log, rest = (log - ops.reciprocal(a), rest * a) if order else (log, rest)
            low = ops.fma(log, 2 / math.pi, rest)
        u = ops.reciprocal(a)
        p = series(P[order], ops.square(u), 0.0, 1 / 25)
        q = series(Q[order], ops.square(u), 0.0, 1 / 25) * u
        # cos and sin of x - (order/2 + 1/4) pi, times sqrt(2).
        sin, cos = ops.sin(a), ops.cos(a)
        c, s = cos + sin, sin - cos
        c, s = (s, -c) if order else (c, s)
        wave = ops.fma(p, s, q * c) if second else p * c - q * s
        high = wave * ops.sqrt(u * (1 / math.pi))
        found = ops.where(a <= 5.0, low, high)
        if not second:
            return ops.where(x < 0.0, -found, found) if order else found
        found = ops.where(ops.eq(x, 0.0), -math.inf, found)
        return ops.where(x < 0.0, math.nan, found)

    return fn


def airy_ai(x: Expr) -> Expr:
    """Ai(x)."""
    a = abs(x)
    root = ops.sqrt(a)
    z = a * root * (2 / 3)
    u, size = ops.reciprocal(z), ops.rsqrt(ops.sqrt(a))
    high = ops.exp(-z) * series(AI_HIGH, u, 0.0, AI_END) * (0.5 / math.sqrt(math.pi)) * size
    square = ops.square(u)
    f = series(AI_SIN, square, 0.0, AI_END**2)
    g = series(AI_COS, square, 0.0, AI_END**2) * u
    sin, cos = ops.sin(z), ops.cos(z)
    # sin and cos of z + pi/4, times sqrt(2).
    wave = f * (sin + cos) - g * (cos - sin)
    low = wave * (1 / math.sqrt(2 * math.pi)) * size
    ends = ops.where(x < 0.0, low, high)
    ends = ops.where(ops.isinf(x), math.nan, ends)  # as eager
    return ops.where(a <= 2.0, series(AI_MID, x, -2.0, 2.0), ends)


def erfcx(x: Expr) -> Expr:
    """exp(x^2) erfc(x), below zero as 2 exp(x^2) - erfcx(-x)."""
    a = abs(x)
    # 1 - 6/(x + 3), which is 1 for infinity.
    t = 1.0 - 6.0 / (a + 3.0)
    high = series(ERFCX, t, -1.0, 1.0) / ops.fma(a, 2.0, 1.0)
    # exp(x^2) with the rounding error of the square.
    square = ops.square(a)
    error = ops.fma(a, a, -square)
    grown = ops.exp(square)
    grown = ops.where(ops.isinf(grown), grown, ops.fma(grown, error, grown))
    return ops.where(x < 0.0, grown * 2.0 - high, high)


def ndtri(p: Expr) -> Expr:
    """The quantile p of the normal distribution: by erfinv in the middle, by -2 log p outside."""
    q = ops.minimum(p, 1.0 - p)
    s = ops.sqrt(ops.log(q) * -2.0)
    u = ops.reciprocal(s)
    out = ops.fma(series(NDTRI, u, 1 / 15, 1 / 1.6), u, ops.fma(ops.log(s), -u, s))
    out = ops.where(p < 0.5, -out, out)
    out = ops.where(ops.eq(q, 0.0), ops.copysign(math.inf, p - 0.5), out)
    middle = ops.erfinv(p + p - 1.0) * math.sqrt(2.0)
    out = ops.where(q > 0.25, middle, out)
    return ops.where(q >= 0.0, out, math.nan)


def spherical_j0(x: Expr) -> Expr:
    """sin(x) / x; below 1/2 by its series up to x^8 / 9! (DLMF 10.49)."""
    square, low = ops.square(x), const(0.0, x.dtype)
    for k in (4, 3, 2, 1, 0):
        low = ops.fma(low, square, (-1) ** k / math.factorial(2 * k + 1))
    return ops.where(abs(x) < 0.5, low, ops.where(ops.isinf(x), 0.0, ops.sin(x) / x))


_enter(digamma, "digamma", "special_digamma", "special_psi", doubles=True)
_enter(_i(0), "i0", "special_i0", "special_modified_bessel_i0")
_enter(_i(1), "special_i1", "special_modified_bessel_i1")
_enter(_scaled_i(0), "special_i0e")
_enter(_scaled_i(1), "special_i1e")
for _order in (0, 1):
    _enter(_bessel(_order, False), f"special_bessel_j{_order}")
    _enter(_bessel(_order, True), f"special_bessel_y{_order}")
    _enter(_k(_order, False), f"special_modified_bessel_k{_order}")
    _enter(_k(_order, True), f"special_scaled_modified_bessel_k{_order}")
_enter(airy_ai, "special_airy_ai")
_enter(erfcx, "special_erfcx")
_enter(ndtri, "special_ndtri")
_enter(spherical_j0, "special_spherical_bessel_j0")


def _chebyshev(name: str, slope: float, shift: float, edge: Callable[[Expr, Expr], Expr]) -> None:
    """Register p(n) = 2 x p(n-1) - p(n-2), p(0) = 1, p(1) = slope x + shift, and that of 2 x - 1.

    `edge(x, n)` is p(n) for |x| = 1 and even n, x as 1 or -1; for odd n it is negative below 0.
    With u(n) = (p(n) for p(1) = 2 x) moved on by one: u(2k) = u(k) (u(k+1) - u(k-1)) and
    u(2k+1) = u(k+1)^2 - u(k)^2, one step per bit of n; p(n) = p(1) u(n) - u(n-1).
    """

    def polynomial(x: Expr, n: Expr, f: Expr) -> Expr:
        twice = x + x
        low, high, known = const(0.0, x.dtype), const(1.0, x.dtype), ops.value_of(n)
        # Beyond, neither eager's results nor these have a correct digit.
        bits = (24 if x.dtype is F32 else 53) if known is None else int(known).bit_length()
        degree = ops.minimum(n, (1 << bits) - 1)
        for bit in reversed(range(bits)):
            before = twice * low - high
            even = low * (high - before)
            odd = ops.square(high) - ops.square(low)
            after = high * (twice * high - low - low)
            is_set = ops.ne(degree & (1 << bit), 0)
            low, high = ops.where(is_set, odd, even), ops.where(is_set, after, odd)
        first = ops.fma(x, slope, shift)
        before = twice * low - high
        found = first * low - before
        # Avoids products of an infinite x and 0.
        few = twice * first - 1.0
        few = ops.where(ops.eq(n, 1), first, few)
        few = ops.where(ops.eq(n, 0), 1.0, few)
        found = ops.where(n <= 2, few, found)
        odd = ops.ne(n & 1, 0)
        end = edge(x, f)
        end = ops.where(odd & (x < 0.0), -end, end)
        found = ops.where(ops.eq(abs(x), 1.0), end, found)
        return ops.where(n < 0, 0.0, found)

    @lowering(f"special_chebyshev_polynomial_{name}")
    def plain(b: GraphBuilder, x: Operand, n: Operand, shifted: bool = False) -> Value:
        t = b.result.dtype

        def fn(i: Index) -> Expr:
            e, f = element(x, i, t), ops.trunc(element(n, i, t))
            e = e + e - 1.0 if shifted else e
            return polynomial(e, ops.cast(f, I64), f)

        return b.map(fn)

    lowering(f"special_shifted_chebyshev_polynomial_{name}")(lambda b, x, n: plain(b, x, n, True))


def _count(x: Expr, n: Expr, above: bool) -> Expr:
    """2 n + 1 at x = 1 (`above`) or at x = -1, and 1 at the other end."""
    long = ops.fma(n, 2.0, 1.0)
    at_one, one = x > 0.0, const(1.0, n.dtype)
    return ops.where(at_one, *((long, one) if above else (one, long)))


_chebyshev("t", 1.0, 0.0, lambda x, n: const(1.0, x.dtype))
_chebyshev("u", 2.0, 0.0, lambda x, n: n + 1.0)
_chebyshev("v", 2.0, -1.0, lambda x, n: _count(x, n, False))
_chebyshev("w", 2.0, 1.0, lambda x, n: _count(x, n, True))
