"""Floor division and remainder: every quotient and remainder is built here.

Both come from one split, so that quotient and remainder of a pair always recombine:

    a = k*q + d*r + off,   k = d*k2,   0 <= off < d      =>      a // k = q + r // k2
                                                                 a %  k = d*(r % k2) + off

which holds for floor division when d > 0 and k2 > 0 (k2 of any sign when off is 0). Constant
divisors are made positive first. Divisors are assumed to be nonzero; a constant 0 raises
ZeroDivisionError.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd

from lenz.sym import bounds
from lenz.sym.expr import (
    DIV,
    ONE,
    ZERO,
    Add,
    FloorDiv,
    Int,
    Mod,
    Sym,
    Var,
    as_int,
    children,
    division_node,
    linear,
    scale,
    sum_of,
    sym,
    total,
)
from lenz.sym.polynomial import (
    Monomial,
    common,
    content,
    divide_monomial,
    exact_quotient,
    from_monomial,
    lead,
    monomials,
    multiples,
)
from lenz.sym.prove import prove_le, prove_lt

LARGE = 1 << 31  # a size times a smaller divisor fits in 64 bits
Split = tuple[Sym, Sym, Sym, Sym, Sym]  # q, d, r, k2, off


def ceildiv(a: Sym | int, b: Sym | int) -> Sym:
    """a / b rounded up: (a + b - 1) // b for b > 0, which is -(-a // b) for any b."""
    a, b = sym(a), sym(b)
    if b.lo is not None and b.lo >= 1:
        return floordiv(a + b - 1, b)
    return -floordiv(-a, b)


def flatten(i: Sequence[Sym], shape: Sequence[Sym]) -> Sym:
    """The row-major position of an index."""
    flat: Sym = ZERO
    for v, size in zip(i, shape, strict=True):
        flat = flat * size + v
    return flat


def unflatten(flat: Sym, shape: Sequence[Sym]) -> tuple[Sym, ...]:
    """The index at a row-major position; the shape has no size 0."""
    out: list[Sym] = []
    for size in reversed(shape[1:]):
        out.append(flat % size)
        flat = flat // size
    return tuple(reversed([*out, flat] if shape else out))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; 1 for n < 1."""
    return 1 << max(n - 1, 0).bit_length()


@cache
def floordiv(a: Sym, b: Sym) -> Sym:
    """a // b, rounded down."""
    if type(b) is Int and b.value == 0:
        raise ZeroDivisionError(f"{a!r} // 0")
    if b is ONE or a is ZERO:
        return a
    if a is b:
        return ONE
    lo, hi = bounds.quotient((a.lo, a.hi), (b.lo, b.hi))
    if lo is not None and lo == hi:  # also every constant by a constant
        return Int(lo)
    if b.hi is not None and b.hi < 0:
        return floordiv(-a, -b)
    parts = split_quotient(a, b)
    if parts is not None:
        q, _, r, k2, _ = parts
        return q + floordiv(r, k2)
    if type(b) is Int:
        return _floordiv_int(a, b)
    block = _block(a, b)
    return _nested_quotient(a, b) if block is None else Int(block)


def _floordiv_int(a: Sym, b: Int) -> Sym:
    """a // k for an int k > 1 and an a with nothing to split off."""
    k = b.value
    _, terms = linear(a)
    if terms[0][1] < 0:  # floor_negate: -y // k = -((y + k - 1) // k)
        return scale(floordiv((k - 1) - a, b), -1)
    for t, c in terms:
        if c == 1 and a is not t and type(t) is FloorDiv and (as_int(t.den * b) or LARGE) < LARGE:
            # nested_floor_shift: (x + n // m) // k = (m*x + n) // (m*k)
            return floordiv(t.num + (a - t) * t.den, t.den * b)
    return _nested_quotient(a, b)


def _nested_quotient(a: Sym, b: Sym) -> Sym:
    """A quotient of a quotient or a remainder, for b > 0 and w > 0.

    (n // m) // b = n // (m*b)              nested_floor
    (n % (b*w)) // b = (n // b) % w         floor_of_mod
    """
    if b.lo is not None and b.lo >= 1:
        if type(a) is FloorDiv and (as_int(a.den * b) or 0) < LARGE:
            return floordiv(a.num, a.den * b)
        if type(a) is Mod:
            w = exact_quotient(a.den, b)
            if w is not None and w.lo is not None and w.lo >= 1:
                return mod(floordiv(a.num, b), w)
    return division_node(FloorDiv, a, b)


@cache
def mod(a: Sym, b: Sym) -> Sym:
    """a % b, with the sign of b."""
    if type(b) is Int and b.value == 0:
        raise ZeroDivisionError(f"{a!r} % 0")
    if b is ONE or a is ZERO or a is b:
        return ZERO
    lo, hi = bounds.quotient((a.lo, a.hi), (b.lo, b.hi))
    if lo is not None and lo == hi:  # a - b*(a // b)
        return a - scale(b, lo)
    if b.hi is not None and b.hi < 0:
        return -mod(-a, -b)
    parts = split_quotient(a, b)
    if parts is not None:
        _, d, r, k2, off = parts
        return d * mod(r, k2) + off
    if type(b) is Int and linear(a)[1][0][1] < 0:  # mod_negate: -y % k = k - 1 - (y + k - 1) % k
        return (b.value - 1) - mod((b.value - 1) - a, b)
    if type(a) is Mod and exact_quotient(a.den, b) is not None:  # nested_mod
        return mod(a.num, b)
    if type(b) is Int and not a.mark and type(a) is not Add:
        return division_node(Mod, a, b)
    q = floordiv(a, b)
    if not q.mark & DIV:  # the quotient is a polynomial: so is the remainder
        return a - q * b
    return division_node(Mod, a, b)


def split_quotient(a: Sym, b: Sym) -> Split | None:
    """The split of the module's docstring; None if it is trivial (q = 0, d = 1)."""
    if type(b) is Int:
        return _split_int(a, b) if type(a) is Add else None
    return _split_symbolic(a, b)


def _split_int(a: Add, b: Int) -> Split | None:
    """The split for an int divisor k > 1.

    Multiples of k go to q. The other terms are ordered by their common factor with k: a head
    divisible by d stays, and the tail, which provably lies in one block of length d, goes to off.
    """
    k = b.value
    q_const, rest_const = divmod(a.const, k)
    q: list[tuple[Sym, int]] = []
    rest: list[tuple[int, Sym, int]] = []
    for t, c in a.terms:
        part = c // k if c > 0 else -(-c // k)  # towards zero, so that i // 8 stays i // 8
        if part:
            q.append((t, part))
            c -= part * k
        if c:
            rest.append((-gcd(c, k), t, c))
    rest.sort(key=lambda item: item[0])
    cut, d, block = _cut(k, rest_const, rest)
    if d == 1 and not q and not q_const:
        return None
    r_coefs = {t: c // d for _, t, c in rest[:cut]}
    r = total(block, r_coefs)
    off = sum_of([(t, c) for _, t, c in rest[cut:]]) + (rest_const - block * d)
    return sum_of(q) + q_const, Int(d), r, Int(k // d), off


def _cut(k: int, const: int, rest: list[tuple[int, Sym, int]]) -> tuple[int, int, int]:
    """(cut, d, m): the head rest[:cut] stays.

    d divides k and the coefficients of rest[:cut]; const + rest[cut:] lies in [m*d, (m+1)*d).
    """
    tails: list[bounds.Bounds] = [(const, const)]
    for _, t, c in reversed(rest):
        tails.append(bounds.plus(tails[-1], (t.lo, t.hi), c))
    n, d = len(rest), k
    for cut in range(n + 1):
        if cut:
            d = gcd(d, rest[cut - 1][2])
        low, high = tails[n - cut]
        if low is not None and high is not None and low // d == high // d:
            return cut, d, low // d
    raise AssertionError("the constant alone always lies in one block")


@cache
def _split_symbolic(a: Sym, b: Sym) -> Split | None:
    """The split for a symbolic divisor.

    Polynomial division, then a common monomial d of b and a part of a.
    """
    q = multiples(a, lead(b))
    if q is not ZERO:
        r = a - q * b
        if len(linear(r)[1]) < len(linear(a)[1]) or r is ZERO or isinstance(r, Int):
            return q, ONE, r, b, ZERO
    shared = content(b)
    seen: list[Monomial] = []
    for m in monomials(a):
        g = common(m, shared)
        if g == (1, ()) or g in seen:
            continue
        seen.append(g)
        u = sum_of([(from_monomial(n), 1) for n in monomials(a) if common(n, g) == g])
        off = a - u
        d, k2 = from_monomial(g), divide_monomial(b, g)
        rest = divide_monomial(u, g)
        if k2 is None or rest is None:
            continue
        if off is ZERO or (k2.lo is not None and k2.lo >= 1 and _block(off, d) == 0):
            return ZERO, d, rest, k2, off
    return None


def _block(a: Sym, b: Sym) -> int | None:
    """m if a provably lies in [m*b, (m+1)*b) with m = 0 or -1, else None."""
    may_be_first = a.lo is None or a.lo >= 0 or a.hi is None or a.hi > 0
    if may_be_first and prove_lt(a, b) and prove_le(ZERO, a):
        return 0
    if a.hi is not None and a.hi < 0 and prove_le(ZERO, a + b):
        return -1
    return None


def divisions_of(s: Sym, variables: Sequence[Var]) -> list[FloorDiv | Mod]:
    """The quotients and remainders in s that vary with one of the variables."""
    varies = any(v in s.free_vars for v in variables)
    found = [s] if varies and isinstance(s, (FloorDiv, Mod)) else []
    return found + [x for part in children(s) for x in divisions_of(part, variables)]
