"""Rules for sums: an index split over several dims and flattened again is the index itself.

    c*(n % b) + c*b*(n // b)            = c*n                 div_mod_join
    c*n - c*b*(n // b)                  = c*(n % b)           mod_from_div
    c*(n % b) + c*b*((n // b) % a)      = c*(n % (a*b))       mod_mod_join, a > 0, b > 0

`n // b` stands for its canonical form, which covers intermediate steps: (x // 8) % 4 pairs with x
// 32. `c` may be a product of an int and symbolic factors. Every rule removes a division or a
remainder, so the loop ends.
"""

from __future__ import annotations

from functools import cache

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
    mods: list[Sym] = []
    divs: list[Sym] = []
    for t in coefs:
        if t.mark & MOD:
            mods.append(t)
        if t.mark & DIV:
            divs.append(t)
    if len(mods) > 1:
        mods.sort(key=_key)
    if mods and divs:
        for t in mods:
            if change := _join(coefs, t):
                return change
    if len(mods) > 1:
        uppers = _by_numerator(mods)
        for t in mods:
            if change := _join_mods(coefs, uppers, t):
                return change
    if len(divs) > 1:
        divs.sort(key=_key)
    for t in divs:
        if change := _remainder(coefs, t):
            return change
    return None


def _by_numerator(mods: list[Sym]) -> dict[Sym, list[tuple[Sym, Mod]]]:
    """n -> the (term, remainder in it) pairs with the remainder n % b, b > 0."""
    out: dict[Sym, list[tuple[Sym, Mod]]] = {}
    for t in mods:
        for m, _ in _cofactors(t, Mod):
            assert type(m) is Mod
            if m.den.lo is not None and m.den.lo >= 1:
                out.setdefault(m.num, []).append((t, m))
    return out


def _cofactors(t: Sym, kind: type[Sym]) -> list[tuple[Sym, Sym]]:
    """The ways to read t as (factor of the kind, product of the others)."""
    if type(t) is kind:
        return [(t, ONE)]
    if type(t) is not Mul:
        return []
    out: list[tuple[Sym, Sym]] = []
    for i, f in enumerate(t.factors):
        if type(f) is kind and f not in t.factors[:i]:
            others = t.factors[:i] + t.factors[i + 1 :]
            out.append((f, polynomial.from_monomial((1, others))))
    return out


@cache
def _whole(m: Mod) -> tuple[Sym, Sym]:
    """(n // b, b*(n // b)) for the remainder n % b."""
    q = m.num // m.den
    return q, q * m.den


def _join(coefs: dict[Sym, int], t: Sym) -> Change | None:
    """div_mod_join, for the remainder in t."""
    c = coefs[t]
    for m, rest in _cofactors(t, Mod):
        assert type(m) is Mod
        need = _whole(m)[1] if rest is ONE else _whole(m)[1] * rest
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


def _join_mods(
    coefs: dict[Sym, int], uppers: dict[Sym, list[tuple[Sym, Mod]]], t: Sym
) -> Change | None:
    """mod_mod_join, with t the lower part."""
    c = coefs[t]
    for m, rest in _cofactors(t, Mod):
        assert type(m) is Mod
        pairs = uppers.get(_whole(m)[0])
        if pairs is None or m.den.lo is None or m.den.lo < 1:
            continue
        for u, upper in pairs:
            need = scale(m.den * upper * rest, c)
            if u is not t and linear(need) == (0, ((u, coefs[u]),)):
                return (m.num % (m.den * upper.den) * rest, c), (t, -c), (need, -1)
    return None


def _remainder(coefs: dict[Sym, int], t: Sym) -> Change | None:
    """mod_from_div, for the division in t."""
    if type(t) is FloorDiv and type(t.den) is Int:  # the common case, decided without building
        c, left = divmod(-coefs[t], t.den.value)
        if left:
            return None
        for u, k in linear(t.num)[1]:
            if coefs.get(u) != c * k:
                return None
        return (t.num % t.den, c), (t.num, -c), (t, -coefs[t])
    for d, rest in _cofactors(t, FloorDiv):
        assert type(d) is FloorDiv
        times = polynomial.exact_quotient(scale(rest, -coefs[t]), d.den)
        if times is None or times is ZERO:
            continue
        need = d.num * times
        if all(coefs.get(u) == k for u, k in linear(need)[1]):
            return (d.num % d.den * times, 1), (need, -1), (t, -coefs[t])
    return None
