"""Proofs from the ranges of the variables.

True means proved for all values; False means only: not proved.
"""

from __future__ import annotations

from functools import cache
from math import gcd, prod

from lenz.sym.expr import (
    DIV,
    MOD,
    ZERO,
    Add,
    FloorDiv,
    Int,
    Max,
    Min,
    Mod,
    Mul,
    Sym,
    Var,
    factors,
    linear,
    sym,
)
from lenz.sym.polynomial import affine_in

MAX_STEPS = 16  # substituted bounds per proof: more than an index of 8 dims needs


def prove_eq(a: Sym | int, b: Sym | int) -> bool:
    """a == b for all values in the ranges."""
    a, b = sym(a), sym(b)
    return a is b or a - b is ZERO


def prove_le(a: Sym | int, b: Sym | int) -> bool:
    """a <= b for all values in the ranges."""
    a, b = sym(a), sym(b)
    if a is b or (a.hi is not None and b.lo is not None and a.hi <= b.lo):
        return True
    return _is_nonnegative(b - a)


def prove_lt(a: Sym | int, b: Sym | int) -> bool:
    """a < b for all values in the ranges."""
    a, b = sym(a), sym(b)
    if a.hi is not None and b.lo is not None and a.hi < b.lo:
        return True
    return a is not b and _is_nonnegative(b - a - 1)


def prove_divides(k: Sym | int, e: Sym | int) -> bool:
    """e is a multiple of k for all values in the ranges; k may not be 0 there."""
    k, e = sym(k), sym(e)
    if e is ZERO:
        return True
    if type(k) is Int:
        if k.value == 0:
            return False
        if divisor(e) % k.value == 0:
            return True
    return e % k is ZERO


def is_within(e: Sym, limit: int) -> bool:
    """-limit < e < limit for all values in the ranges; of a sum also each product."""
    terms = ((e, 1), *(e.terms if isinstance(e, Add) else ()))
    known = [(c * t.lo, c * t.hi) for t, c in terms if t.lo is not None and t.hi is not None]
    return len(known) == len(terms) and all(abs(x) < limit for ends in known for x in ends)


@cache
def divisor(e: Sym) -> int:
    """The largest int known to divide e for all values.

    0 for the constant 0, which everything divides.
    """
    match e:
        case Int():
            return abs(e.value)
        case Add():
            return gcd(e.const, *[c * divisor(t) for t, c in e.terms])
        case Mul():
            return prod(map(divisor, e.factors))
        case Mod():
            return gcd(divisor(e.num), divisor(e.den))
        case Min() | Max():
            return gcd(*[divisor(x) for x in e.args])
        case _:
            return 1


def _is_nonnegative(e: Sym) -> bool:
    if e.lo is not None and e.lo >= 0:
        return True
    if e.hi is not None and e.hi < 0:
        return False
    return _descend(e)


@cache
def _descend(e: Sym) -> bool:
    """Replace one variable after the other by the end of its range that minimises e.

    Sound: if e = c*x + rest with c >= 0 (<= 0), e is at least its value at the lower (upper) end of
    x.
    """
    for _ in range(MAX_STEPS):
        step = _lower(e)
        if step is None:
            return False
        if step.lo is not None and step.lo >= 0:
            return True
        e = step
    return False


def _lower(e: Sym) -> Sym | None:
    """e with one atom replaced by the end of its range.

    Atoms with a symbolic end first, since they lead to others.
    """
    atoms: dict[Sym, int] = {}  # with the coefficient of an atom that is a term and no factor
    for t, c in linear(e)[1]:
        for x in factors(t):
            atoms[x] = 0 if x in atoms or x is not t else c
    for symbolic in (True, False):
        for x, c in atoms.items():
            top = _symbolic_top(x)
            if (top is not None) != symbolic:
                continue
            if top is None and x.hi is not None:
                top = Int(x.hi)
            if c and (x.lo if c > 0 else top) is None:
                continue  # a sum of n sizes would be taken apart n times
            step = _replace(e, x, top)
            if step is not None:
                return step
    return None


def _symbolic_top(x: Sym) -> Sym | None:
    """A symbolic inclusive upper bound of an atom."""
    if type(x) is Var:
        return None if x.below is None else x.below - 1
    if type(x) is Mod and type(x.den) is not Int and x.den.lo is not None and x.den.lo >= 1:
        return x.den - 1
    if type(x) is FloorDiv and x.den.lo is not None and x.den.lo >= 1 and type(x.num) is Var:
        limit = x.num.below
        if limit is not None:
            top = (limit - 1) // x.den
            return None if top.mark & (DIV | MOD) else top
    return None


def _replace(e: Sym, x: Sym, top: Sym | None) -> Sym | None:
    """The minimum of e over x; None if e is not affine in x, or the sign or end is unknown."""
    if (parts := affine_in(e, x)) is None:
        return None
    coef, rest = parts
    if coef.lo is not None and coef.lo >= 0:
        end: Sym | None = None if x.lo is None else Int(x.lo)
    elif coef.hi is not None and coef.hi <= 0:
        end = top
    else:
        return None
    return None if end is None else coef * end + rest
