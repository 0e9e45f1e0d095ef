"""The table of rules that the constructors apply, each with its name, equation and condition.

A rule's two sides are functions that take Python ints as well as symbolic integers. The tests read
this table: on ints both sides are compared over small ranges (is the equation true, with floor
semantics and operands of both signs?), on symbolic integers the left side must build the very
object that the right side builds (does the code do it?), and the right side has no more divisions,
remainders, minima and maxima than the left. Divisors are nonzero.

The code of the rules stands in `lenz/sym/`: `expr` (sums and products), `divide`, `recombine` and
`extremum`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lenz.sym.divide import ceildiv as _ceildiv
from lenz.sym.extremum import maximum, minimum

Side = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Hole:
    """One letter of a rule.

    A constant is tried with each int of lo..hi; a variable has these bounds (None: open).

    `high` gives the exclusive upper bound from the letters before, in their order, where that
    depends on them.
    """

    name: str
    lo: int | None = None
    hi: int | None = None
    is_constant: bool = False
    high: Side | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """left = right for all values of the holes; both sides take the holes in order."""

    name: str
    equation: str
    holes: tuple[Hole, ...]
    left: Side
    right: Side


def _min(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else minimum(a, b)


def _max(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else maximum(a, b)


def _ceil(a: Any, b: Any) -> Any:
    return -(-a // b) if isinstance(a, int) and isinstance(b, int) else _ceildiv(a, b)


def _const(name: str, lo: int = 2, hi: int = 5) -> Hole:
    return Hole(name, lo, hi, is_constant=True)


X, Y, Z = Hole("x"), Hole("y"), Hole("z")
A, B, C, D, K = _const("a"), _const("b"), _const("c", -3, 3), _const("d"), _const("k")
S, T = Hole("s", 1), Hole("t", 1)  # sizes
BELOW_K = Hole("r", 0, high=lambda *holes: holes[0])  # 0 <= r < the first letter

SUMS = (
    Rule("add_zero", "x + 0 = x", (X,), lambda x: x + 0, lambda x: x),
    Rule("sub_self", "x - x = 0", (X,), lambda x: x - x, lambda x: 0 * x),
    Rule("mul_one", "x*1 = x", (X,), lambda x: x * 1, lambda x: x),
    Rule("mul_zero", "x*0 = 0", (X,), lambda x: x * 0, lambda x: x - x),
    Rule(
        "collect",
        "a*x + c*x = (a + c)*x",
        (A, C, X),
        lambda a, c, x: a * x + c * x,
        lambda a, c, x: (a + c) * x,
    ),
    Rule("commute", "x + y = y + x", (X, Y), lambda x, y: x + y, lambda x, y: y + x),
    Rule(
        "expand",
        "x*(y + z) = x*y + x*z",
        (X, Y, Z),
        lambda x, y, z: x * (y + z),
        lambda x, y, z: x * y + x * z,
    ),
)

DIVISIONS = (
    Rule("div_one", "x // 1 = x", (X,), lambda x: x // 1, lambda x: x),
    Rule("mod_one", "x % 1 = 0", (X,), lambda x: x % 1, lambda x: 0 * x),
    Rule("zero_div", "0 // s = 0", (S,), lambda s: 0 // s, lambda s: 0 * s),
    Rule("zero_mod", "0 % s = 0", (S,), lambda s: 0 % s, lambda s: 0 * s),
    Rule("div_self", "s // s = 1", (S,), lambda s: s // s, lambda s: 0 * s + 1),
    Rule("mod_self", "s % s = 0", (S,), lambda s: s % s, lambda s: 0 * s),
    Rule("div_sign", "x // -k = -x // k", (K, X), lambda k, x: x // -k, lambda k, x: -x // k),
    Rule("mod_sign", "x % -k = -(-x % k)", (K, X), lambda k, x: x % -k, lambda k, x: -(-x % k)),
    Rule("div_small", "r // k = 0, 0 <= r < k", (K, BELOW_K),
         lambda k, r: r // k, lambda k, r: 0 * r),
    Rule("mod_small", "r % k = r, 0 <= r < k", (K, BELOW_K), lambda k, r: r % k, lambda k, r: r),
    Rule("div_block", "(r + c*k) // k = c", (K, C, BELOW_K),
         lambda k, c, r: (r + c * k) // k, lambda k, c, r: c + 0 * r),
    Rule("div_whole", "(k*x + y) // k = x + y // k", (K, X, Y),
         lambda k, x, y: (k * x + y) // k, lambda k, x, y: x + y // k),
    Rule("mod_whole", "(k*x + y) % k = y % k", (K, X, Y),
         lambda k, x, y: (k * x + y) % k, lambda k, x, y: y % k),
    Rule("div_over", "((k + 1)*x) // k = x + x // k", (K, X),
         lambda k, x: (k + 1) * x // k, lambda k, x: x + x // k),
    Rule("mod_over", "((k + 1)*x) % k = x % k", (K, X),
         lambda k, x: (k + 1) * x % k, lambda k, x: x % k),
    Rule("div_split", "(k*x + r) // k = x, 0 <= r < k", (K, X, BELOW_K),
         lambda k, x, r: (k * x + r) // k, lambda k, x, r: x),
    Rule("mod_split", "(k*x + r) % k = r, 0 <= r < k", (K, X, BELOW_K),
         lambda k, x, r: (k * x + r) % k, lambda k, x, r: r),
    Rule("div_common", "(d*x + c) // (d*k) = (x + c // d) // k", (D, K, C, X),
         lambda d, k, c, x: (d * x + c) // (d * k), lambda d, k, c, x: (x + c // d) // k),
    Rule("mod_common", "(d*x + c) % (d*k) = d*((x + c // d) % k) + c % d", (D, K, C, X),
         lambda d, k, c, x: (d * x + c) % (d * k),
         lambda d, k, c, x: d * ((x + c // d) % k) + c % d),
    Rule("div_part", "(d*x + r) // (d*k) = x // k, 0 <= r < d", (D, K, X, BELOW_K),
         lambda d, k, x, r: (d * x + r) // (d * k), lambda d, k, x, r: x // k),
    Rule("mod_part", "(d*x + r) % (d*k) = d*(x % k) + r, 0 <= r < d", (D, K, X, BELOW_K),
         lambda d, k, x, r: (d * x + r) % (d * k), lambda d, k, x, r: d * (x % k) + r),
    Rule("floor_negate", "-x // k = -((x + k - 1) // k)", (K, X),
         lambda k, x: -x // k, lambda k, x: -((x + k - 1) // k)),
    Rule("mod_negate", "-x % k = k - 1 - (x + k - 1) % k", (K, X),
         lambda k, x: -x % k, lambda k, x: k - 1 - (x + k - 1) % k),
    Rule("ceil", "ceildiv(x, k) = (x + k - 1) // k", (K, X),
         lambda k, x: _ceil(x, k), lambda k, x: (x + k - 1) // k),
    Rule("nested_floor", "(x // a) // b = x // (a*b)", (A, B, X),
         lambda a, b, x: x // a // b, lambda a, b, x: x // (a * b)),
    Rule("nested_floor_shift", "(x // a + c) // b = (x + a*c) // (a*b)", (A, B, C, X),
         lambda a, b, c, x: (x // a + c) // b, lambda a, b, c, x: (x + a * c) // (a * b)),
    Rule("nested_floor_sum", "(x // a + y) // b = (x + a*y) // (a*b)", (A, B, X, Y),
         lambda a, b, x, y: (x // a + y) // b, lambda a, b, x, y: (x + a * y) // (a * b)),
    Rule("nested_mod", "(x % (a*b)) % b = x % b", (A, B, X),
         lambda a, b, x: x % (a * b) % b, lambda a, b, x: x % b),
    Rule("floor_of_mod", "(x % (a*b)) // b = (x // b) % a", (A, B, X),
         lambda a, b, x: x % (a * b) // b, lambda a, b, x: x // b % a),
)  # fmt: skip


def _flat_digits(n: Any, a: int, b: int) -> Any:
    return n // (a * b) * (a * b) + n // a % b * a + n % a


JOINS = (
    Rule("div_mod_join", "c*a*(x // a) + c*(x % a) = c*x", (A, C, X),
         lambda a, c, x: c * a * (x // a) + c * (x % a), lambda a, c, x: c * x),
    Rule("step_join", "b*(x // (a*b)) + (x // a) % b = x // a", (A, B, X),
         lambda a, b, x: b * (x // (a * b)) + x // a % b, lambda a, b, x: x // a),
    Rule("flatten_split", "x // (a*b)*(a*b) + ((x // a) % b)*a + x % a = x", (A, B, X),
         lambda a, b, x: x // (a * b) * (a * b) + x // a % b * a + x % a, lambda a, b, x: x),
    Rule("flatten_split_sum", "the same of (a + 1)*y + x, whose digits are those of y + x",
         (A, B, X, Y),
         lambda a, b, x, y: _flat_digits((a + 1) * y + x, a, b),
         lambda a, b, x, y: (a + 1) * y + x),
    Rule("mod_from_div", "x - a*(x // a) = x % a", (A, X),
         lambda a, x: x - a * (x // a), lambda a, x: x % a),
    Rule("mod_mod_join", "b*((x // b) % a) + x % b = x % (a*b)", (A, B, X),
         lambda a, b, x: b * (x // b % a) + x % b, lambda a, b, x: x % (a * b)),
)  # fmt: skip

_BELOW_S = Hole("j", 0, high=lambda *holes: holes[0])
_BELOW_T = Hole("m", 0, high=lambda *holes: holes[1])

SYMBOLIC = (
    Rule("size_div_small", "j // s = 0, 0 <= j < s", (S, _BELOW_S),
         lambda s, j: j // s, lambda s, j: 0 * j),
    Rule("size_mod_small", "j % s = j, 0 <= j < s", (S, _BELOW_S),
         lambda s, j: j % s, lambda s, j: j),
    Rule("size_div_split", "(s*x + j) // s = x, 0 <= j < s", (S, _BELOW_S, X),
         lambda s, j, x: (s * x + j) // s, lambda s, j, x: x),
    Rule("size_mod_split", "(s*x + j) % s = j, 0 <= j < s", (S, _BELOW_S, X),
         lambda s, j, x: (s * x + j) % s, lambda s, j, x: j),
    Rule("size_div_flat", "((x*s + j)*t + m) // (s*t) = x", (S, T, X, _BELOW_S, _BELOW_T),
         lambda s, t, x, j, m: ((x * s + j) * t + m) // (s * t), lambda s, t, x, j, m: x),
    Rule("size_mod_flat", "((x*s + j)*t + m) // t % s = j", (S, T, X, _BELOW_S, _BELOW_T),
         lambda s, t, x, j, m: ((x * s + j) * t + m) // t % s, lambda s, t, x, j, m: j),
    Rule("size_div_part", "(s*x + j) // (k*s) = x // k, 0 <= j < s", (S, K, X, _BELOW_S),
         lambda s, k, x, j: (s * x + j) // (k * s), lambda s, k, x, j: x // k),
    Rule("size_mod_part", "(s*x + j) % (k*s) = s*(x % k) + j, 0 <= j < s", (S, K, X, _BELOW_S),
         lambda s, k, x, j: (s * x + j) % (k * s), lambda s, k, x, j: s * (x % k) + j),
    Rule("size_div_common", "(s*x) // (s*t) = x // t", (S, T, X),
         lambda s, t, x: s * x // (s * t), lambda s, t, x: x // t),
    Rule("size_mod_common", "(s*x) % (s*t) = s*(x % t)", (S, T, X),
         lambda s, t, x: s * x % (s * t), lambda s, t, x: s * (x % t)),
    Rule("size_div_sum", "((s + 1)*x + j) // (s + 1) = x, 0 <= j < s", (S, _BELOW_S, X),
         lambda s, j, x: ((s + 1) * x + j) // (s + 1), lambda s, j, x: x),
    Rule("size_nested_floor", "(x // s) // t = x // (s*t)", (S, T, X),
         lambda s, t, x: x // s // t, lambda s, t, x: x // (s * t)),
    Rule("size_join", "s*(x // s) + x % s = x", (S, X),
         lambda s, x: s * (x // s) + x % s, lambda s, x: x),
    Rule("size_flatten_split", "x // (s*t)*(s*t) + ((x // t) % s)*t + x % t = x", (S, T, X),
         lambda s, t, x: x // (s * t) * s * t + x // t % s * t + x % t, lambda s, t, x: x),
    Rule("size_mod_from_div", "x - s*(x // s) = x % s", (S, X),
         lambda s, x: x - s * (x // s), lambda s, x: x % s),
    Rule("size_mod_mod_join", "t*((x // t) % s) + x % t = x % (s*t)", (S, T, X),
         lambda s, t, x: t * (x // t % s) + x % t, lambda s, t, x: x % (s * t)),
)  # fmt: skip

EXTREMA = (
    Rule("min_same", "min(x, x) = x", (X,), lambda x: _min(x, x), lambda x: x),
    Rule("max_same", "max(x, x) = x", (X,), lambda x: _max(x, x), lambda x: x),
    Rule("min_bound", "min(r, k) = r, r < k", (K, BELOW_K),
         lambda k, r: _min(r, k), lambda k, r: r),
    Rule("max_bound", "max(r, k) = k, r < k", (K, BELOW_K),
         lambda k, r: _max(r, k), lambda k, r: k + 0 * r),
    Rule("min_shift", "min(x, x + k) = x", (K, X), lambda k, x: _min(x, x + k), lambda k, x: x),
    Rule("max_shift", "max(x, x + k) = x + k", (K, X),
         lambda k, x: _max(x, x + k), lambda k, x: x + k),
    Rule("min_size", "min(j, s) = j, j < s", (S, _BELOW_S),
         lambda s, j: _min(j, s), lambda s, j: j),
    Rule("min_nested", "min(min(x, y), x) = min(x, y)", (X, Y),
         lambda x, y: _min(_min(x, y), x), lambda x, y: _min(x, y)),
    Rule("max_nested", "max(max(x, y), x) = max(x, y)", (X, Y),
         lambda x, y: _max(_max(x, y), x), lambda x, y: _max(x, y)),
)  # fmt: skip

RULES = SUMS + DIVISIONS + JOINS + SYMBOLIC + EXTREMA
