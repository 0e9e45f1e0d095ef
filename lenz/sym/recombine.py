"""Rules for sums: an index that was split over several dims and flattened again is the index.

    c*(n % b) + c*b*(n // b)            = c*n                 div_mod_join
    c*n - c*b*(n // b)                  = c*(n % b)           mod_from_div
    c*(n % b) + c*b*((n // b) % a)      = c*(n % (a*b))       mod_mod_join, a > 0, b > 0

`n // b` stands for its canonical form, which gives the steps between: (x // 8) % 4 pairs with x //
32. `c` may be a product of an int and symbolic factors. Every rule removes a division or a
remainder, so the loop ends.
"""

from __future__ import annotations

from lenz.sym import polynomial
from lenz.sym.expr import (
    DIV,
    MOD,
    ONE,
    ZERO,
    FloorDiv,
    Int,
    Mod,
    Mul,
    Sym,
    _key,
    accumulate,
    linear,
    scale,
)

_WHOLES: dict[Mod, Sym] = {}  # n % b -> canonical b*(n // b)

Change = tuple[tuple[Sym, int], ...]  # what to add to the sum, in multiples


def recombine(const: int, coefs: dict[Sym, int]) -> int:
    """Apply the rules to const + sum of coefs until none applies.

    Changes coefs; returns the new constant.
    """
    while len(coefs) > 1:
        change = _find(coefs)
        if change is None:
            return const
        for e, times in change:
            const += accumulate(coefs, e, times)
    return const


def _find(coefs: dict[Sym, int]) -> Change | None:
    mods = [t for t in coefs if t.mark & MOD]
    divs = [t for t in coefs if t.mark & DIV]
    if len(mods) > 1:
        mods.sort(key=_key)
    if mods and divs:
        for t in mods:
            if change := _join(coefs, t):
                return change
    if len(mods) > 1:
        for t in mods:
            if change := _join_mods(coefs, mods, t):
                return change
    if divs:
        if len(divs) > 1:
            divs.sort(key=_key)
        for t in divs:
            if change := _remainder(coefs, t):
                return change
    return None


def _cofactors(t: Sym, kind: type[Sym]) -> list[tuple[Sym, Sym]]:
    """The ways to read t as (factor of the kind, product of the others)."""
    if type(t) is kind:
        return [(t, ONE)]
    if type(t) is not Mul:
        return []
    out: list[tuple[Sym, Sym]] = []
    for i, f in enumerate(t.factors):
        if type(f) is kind and f not in t.factors[:i]:
            rest: Sym = ONE
            for g in t.factors[:i] + t.factors[i + 1 :]:
                rest = rest * g
            out.append((f, rest))
    return out


def whole(m: Mod) -> Sym:
    """b*(n // b) for the remainder n % b."""
    found = _WHOLES.get(m)
    if found is None:
        found = _WHOLES[m] = (m.num // m.den) * m.den
    return found


def _join(coefs: dict[Sym, int], t: Sym) -> Change | None:
    """div_mod_join, for the remainder in t."""
    c = coefs[t]
    for m, rest in _cofactors(t, Mod):
        assert type(m) is Mod
        need = whole(m) if rest is ONE else whole(m) * rest
        seen = False
        for u, k in linear(need)[1]:
            if u.mark & DIV:
                if coefs.get(u) != c * k:
                    break
                seen = True
        else:
            if seen:
                return (m.num * rest, c), (t, -c), (need, -c)
    return None


def _join_mods(coefs: dict[Sym, int], mods: list[Sym], t: Sym) -> Change | None:
    """mod_mod_join, with t the lower part."""
    c = coefs[t]
    for m, rest in _cofactors(t, Mod):
        assert type(m) is Mod
        if m.den.lo is None or m.den.lo < 1:
            continue
        q = m.num // m.den
        for u in mods:
            if u is t:
                continue
            for upper, _ in _cofactors(u, Mod):
                assert type(upper) is Mod
                if upper.num is not q or upper.den.lo is None or upper.den.lo < 1:
                    continue
                need = scale(m.den * upper * rest, c)
                if linear(need) == (0, ((u, coefs[u]),)):
                    return (m.num % (m.den * upper.den) * rest, c), (t, -c), (need, -1)
    return None


def _remainder(coefs: dict[Sym, int], t: Sym) -> Change | None:
    """mod_from_div, for the division in t."""
    for d, rest in _cofactors(t, FloorDiv):
        assert type(d) is FloorDiv
        c = _multiple(scale(rest, -coefs[t]), d.den)
        if c is None or c is ZERO:
            continue
        need = d.num * c
        if all(coefs.get(u) == k for u, k in linear(need)[1]):
            return (d.num % d.den * c, 1), (need, -1), (t, -coefs[t])
    return None


def _multiple(e: Sym, by: Sym) -> Sym | None:
    """e / by for a single-term e, None where by does not divide it."""
    if type(by) is Int:
        if type(e) is Int:
            return Int(e.value // by.value) if e.value % by.value == 0 else None
        ((t, k),) = linear(e)[1]
        return scale(t, k // by.value) if k % by.value == 0 else None
    if type(e) is Int:
        return None
    return polynomial.exact_quotient(e, by)
