"""Exact symbolic integers, interned and canonical: `is` is structural equality.

Invariants. A `Sym` never changes after construction. `Add` holds an int constant and terms with
nonzero int coefficients, sorted by key; no term is an `Int` or an `Add`. `Mul` is a product of two
or more factors without a coefficient, sorted by key; no factor is an `Int`, an `Add` or a `Mul`, so
that every product is expanded over sums. Division and remainder are Python's (floor). Divisors are
assumed to be nonzero. Nothing here knows torch or a dtype.

`key` is a text that orders nodes the same way in every process; equal keys mean equal nodes. Long
keys are replaced by a digest, so that sorting deep expressions stays fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

from lenz.sym import bounds

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11

MOD, DIV = 1, 2  # bits of `mark`: the node is, or has as a factor or term, a Mod / a FloorDiv
KEY_LIMIT = 160  # characters after which a key becomes a digest
NAME = re.compile(r"[@A-Za-z_][A-Za-z0-9_.]*")
Terms = tuple[tuple["Sym", int], ...]


class Sym:
    """A symbolic integer. `lo` and `hi` are sound inclusive bounds, None where unbounded."""

    __slots__ = ("_free", "hi", "key", "lo", "mark")
    lo: int | None
    hi: int | None
    key: str
    mark: int
    _free: tuple[Var, ...] | None

    @property
    def free_vars(self) -> tuple[Var, ...]:
        """The variables that occur, each once, ordered by name, then by bounds."""
        free = self._free
        if free is None:
            found: dict[Var, None] = {}
            for child in children(self):
                found.update(dict.fromkeys(child.free_vars))
            free = self._free = tuple(sorted(found, key=_key))
        return free

    def __add__(self, other: Sym | int) -> Sym:
        if isinstance(other, Sym):
            return add(self, other)
        return _shift(self, other) if isinstance(other, int) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Sym | int) -> Sym:
        if isinstance(other, Sym):
            return ZERO if self is other else add(self, scale(other, -1))
        return _shift(self, -other) if isinstance(other, int) else NotImplemented

    def __rsub__(self, other: int) -> Sym:
        return _shift(scale(self, -1), other) if isinstance(other, int) else NotImplemented

    def __neg__(self) -> Sym:
        return scale(self, -1)

    def __mul__(self, other: Sym | int) -> Sym:
        if isinstance(other, Sym):
            return multiply(self, other)
        return scale(self, other) if isinstance(other, int) else NotImplemented

    __rmul__ = __mul__

    def __floordiv__(self, other: Sym | int) -> Sym:
        return (
            divide.floordiv(self, sym(other)) if isinstance(other, (Sym, int)) else NotImplemented
        )

    def __rfloordiv__(self, other: int) -> Sym:
        return divide.floordiv(Int(other), self) if isinstance(other, int) else NotImplemented

    def __mod__(self, other: Sym | int) -> Sym:
        return divide.mod(self, sym(other)) if isinstance(other, (Sym, int)) else NotImplemented

    def __rmod__(self, other: int) -> Sym:
        return divide.mod(Int(other), self) if isinstance(other, int) else NotImplemented

    def __bool__(self) -> NoReturn:
        raise TypeError("a symbolic integer has no truth value; use as_int, prove_eq or `is`")

    def __copy__(self) -> Sym:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Sym:
        return self

    def __repr__(self) -> str:
        from lenz.sym.text import show  # text reads this module

        return show(self)


class Int(Sym):
    """A constant."""

    __slots__ = ("value",)
    value: int

    def __new__(cls, value: int) -> Self:
        found: Self | None = _INTS.get(value)
        if found is not None:
            return found
        value = int(value)  # no bool inside
        e = object.__new__(cls)
        e.value = e.lo = e.hi = value
        e.key, e.mark, e._free = f"#{value}", 0, ()
        kept: Self = _INTS.setdefault(value, e)  # one step, since threads may build the same
        return kept


class Var(Sym):
    """A named integer with lo <= v <= hi and, if `below` is given, v < below.

    Variables with the same name and different bounds are different objects. `substitute` does not
    look into `below`.
    """

    __slots__ = ("below", "name")
    name: str
    below: Sym | None

    def __new__(
        cls, name: str, lo: int | None = None, hi: int | None = None, below: Sym | int | None = None
    ) -> Self:
        limit = None if below is None else sym(below)
        if limit is not None and limit.hi is not None and (hi is None or limit.hi - 1 < hi):
            hi = limit.hi - 1
        if isinstance(limit, Int):  # says no more than hi
            limit = None
        ident = (name, lo, hi, limit)
        found: Self | None = _VARS.get(ident)
        if found is not None:
            return found
        if NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not a name for a Var: want [@A-Za-z_][A-Za-z0-9_.]*")
        e = object.__new__(cls)
        e.name, e.lo, e.hi, e.below = name, lo, hi, limit
        tail = "" if limit is None else order_key(limit)
        e.key = _bounded(f"${name}\0{lo}:{hi}:{tail}")
        e.mark, e._free = 0, (e,)
        kept: Self = _VARS.setdefault(ident, e)
        return kept


class _Built(Sym):
    """A node that operators and functions build, in canonical form."""

    __slots__ = ()

    def __new__(cls) -> Self:
        raise TypeError(f"{cls.__name__}: {cls.__doc__}")


class Add(_Built):
    """const + sum of coefficient*term. Build with `a + b`."""

    __slots__ = ("const", "terms")
    const: int
    terms: Terms


class Mul(_Built):
    """A product of two or more factors, none an Int, Add or Mul. Build with `*`."""

    __slots__ = ("factors",)
    factors: tuple[Sym, ...]


class FloorDiv(_Built):
    """num // den, rounded down. Build with `//`."""

    __slots__ = ("den", "num")
    num: Sym
    den: Sym


class Mod(_Built):
    """num % den, with the sign of den. Build with `%`."""

    __slots__ = ("den", "num")
    num: Sym
    den: Sym


class Min(_Built):
    """The smallest of two or more args, sorted by key. Build with `minimum`."""

    __slots__ = ("args",)
    args: tuple[Sym, ...]


class Max(_Built):
    """The largest of two or more args, sorted by key. Build with `maximum`."""

    __slots__ = ("args",)
    args: tuple[Sym, ...]


_key = attrgetter("key")
_INTS: dict[int, Any] = {}  # Any, since Int may be given as Self
_VARS: dict[tuple[str, int | None, int | None, Sym | None], Any] = {}
_ADDS: dict[tuple[int, Terms], Add] = {}
_MULS: dict[tuple[Sym, ...], Mul] = {}
_DIVISIONS: dict[tuple[type, Sym, Sym], FloorDiv | Mod] = {}
_EXTREMES: dict[tuple[type, tuple[Sym, ...]], Min | Max] = {}
ZERO = Int(0)
ONE = Int(1)


def sym(x: int | Sym) -> Sym:
    """x as a symbolic integer. Raises TypeError for anything but an int or a Sym."""
    if isinstance(x, Sym):
        return x
    if isinstance(x, int):
        return Int(x)
    raise TypeError(f"a symbolic integer is made from an int or a Sym, not {type(x).__name__}")


def as_int(e: Sym) -> int | None:
    """The value of a constant, None for anything else."""
    return e.value if type(e) is Int else None


def children(e: Sym) -> tuple[Sym, ...]:
    """The direct operands of e, in order."""
    if type(e) is Add:
        return tuple(t for t, _ in e.terms)
    if type(e) is Mul:
        return e.factors
    if type(e) is FloorDiv or type(e) is Mod:
        return (e.num, e.den)
    if type(e) is Min or type(e) is Max:
        return e.args
    return ()


def subterms(*syms: Sym) -> Iterator[Sym]:
    """The expressions and all that they are made of, outer before inner."""
    todo = list(syms)
    for e in todo:
        yield e
        todo.extend(children(e))


def linear(e: Sym) -> tuple[int, Terms]:
    """e as (constant, terms): e == constant + sum of coefficient*term."""
    if type(e) is Add:
        return e.const, e.terms
    if type(e) is Int:
        return e.value, ()
    return 0, ((e, 1),)


def factors(e: Sym) -> tuple[Sym, ...]:
    """The factors of a term (anything but an Int or an Add)."""
    return e.factors if type(e) is Mul else (e,)


def _bounded(key: str) -> str:
    if len(key) <= KEY_LIMIT:
        return key
    return key[:40] + "~" + blake2b(key.encode(), digest_size=20).hexdigest()


def order_key(e: Sym) -> str:
    """The ordering key; an Add gets its own when first asked, since most are never compared."""
    if not e.key and type(e) is Add:
        e.key = _bounded("(" + "+".join(f"{c}*{t.key}" for t, c in e.terms) + f"+{e.const})")
    return e.key


def _interned_add(const: int, terms: Terms) -> Add:
    ident = (const, terms)
    found = _ADDS.get(ident)
    if found is not None:
        return found
    within: bounds.Bounds = const, const
    mark = 0
    for t, c in terms:
        mark |= t.mark
        within = bounds.plus(within, (t.lo, t.hi), c)
    e = object.__new__(Add)
    (e.lo, e.hi), e.const, e.terms, e.mark, e.key, e._free = within, const, terms, mark, "", None
    return _ADDS.setdefault(ident, e)


def accumulate(coefs: dict[Sym, int], e: Sym, times: int = 1) -> int:
    """Add times*e into coefs (term -> coefficient, zeros removed) and return its constant part."""
    if type(e) is Int:
        return times * e.value
    const, terms = (e.const, e.terms) if type(e) is Add else (0, ((e, 1),))
    for t, c in terms:
        total = coefs.get(t, 0) + times * c
        if total:
            coefs[t] = total
        else:
            coefs.pop(t, None)
    return times * const


def total(const: int, coefs: dict[Sym, int]) -> Sym:
    """The canonical const + sum of coefficient*term. Consumes coefs, which holds no zero."""
    if len(coefs) > 1:
        mark = 0
        for t in coefs:
            mark |= t.mark
        if mark:
            const = recombine.recombine(const, coefs)
    if not coefs:
        return Int(const)
    if len(coefs) == 1:
        (pair,) = coefs.items()
        return pair[0] if const == 0 and pair[1] == 1 else _interned_add(const, (pair,))
    return _interned_add(const, tuple([(t, coefs[t]) for t in sorted(coefs, key=_key)]))


def sum_of(items: Iterable[tuple[Sym, int]]) -> Sym:
    """The sum of coefficient*expression over (expression, coefficient) pairs, built at once."""
    coefs: dict[Sym, int] = {}
    const = 0
    for e, c in items:
        const += accumulate(coefs, e, c)
    return total(const, coefs)


def add(a: Sym, b: Sym) -> Sym:
    """a + b."""
    if type(b) is Int:
        return _shift(a, b.value)
    if type(a) is Int:
        return _shift(b, a.value)
    coefs = dict(a.terms) if type(a) is Add else {a: 1}
    const = a.const if type(a) is Add else 0
    return total(const + accumulate(coefs, b), coefs)


def _shift(e: Sym, by: int) -> Sym:
    """e + by: the terms stay as they are."""
    if by == 0:
        return e
    if type(e) is Int:
        return Int(e.value + by)
    if type(e) is not Add:
        return _interned_add(int(by), ((e, 1),))
    const = e.const + by
    if const == 0 and len(e.terms) == 1 and e.terms[0][1] == 1:
        return e.terms[0][0]
    return _interned_add(const, e.terms)


def scale(e: Sym, by: int) -> Sym:
    """by * e.

    The order of the terms stays, and no rule for sums can newly apply (they are homogeneous).
    """
    if by == 1:
        return e
    if by == 0:
        return ZERO
    if type(e) is Int:
        return Int(e.value * by)
    if type(e) is not Add:
        return _interned_add(0, ((e, int(by)),))
    if e.const == 0 and len(e.terms) == 1 and e.terms[0][1] * by == 1:
        return e.terms[0][0]
    return _interned_add(e.const * by, tuple([(t, c * by) for t, c in e.terms]))


def term_product(a: Sym, b: Sym) -> Sym:
    """The product of two terms (neither an Int nor an Add)."""
    found = tuple(sorted(factors(a) + factors(b), key=_key))
    e = _MULS.get(found)
    if e is None:
        e = object.__new__(Mul)
        e.factors = found
        e.lo, e.hi = bounds.interval_product((a.lo, a.hi), (b.lo, b.hi))
        e.key, e.mark, e._free = _bounded("*".join(f.key for f in found)), a.mark | b.mark, None
        e = _MULS.setdefault(found, e)
    return e


def multiply(a: Sym, b: Sym) -> Sym:
    """a * b, expanded over sums."""
    if type(b) is Int:
        return scale(a, b.value)
    if type(a) is Int:
        return scale(b, a.value)
    if type(a) is not Add and type(b) is not Add:
        return term_product(a, b)
    a_const, a_terms = linear(a)
    b_const, b_terms = linear(b)
    coefs: dict[Sym, int] = {}
    for t, c in a_terms:
        for u, d in b_terms:
            accumulate(coefs, term_product(t, u), c * d)
        if b_const:
            accumulate(coefs, t, c * b_const)
    if a_const:
        for u, d in b_terms:
            accumulate(coefs, u, d * a_const)
    return total(a_const * b_const, coefs)


def division_node(kind: type[FloorDiv] | type[Mod], num: Sym, den: Sym) -> FloorDiv | Mod:
    """The interned num // den or num % den, for rules that found nothing simpler."""
    e = _DIVISIONS.get((kind, num, den))
    if e is None:
        e = object.__new__(kind)
        e.num, e.den = num, den
        within, sign, e.mark = (
            (bounds.quotient, "/", DIV) if kind is FloorDiv else (bounds.remainder, "%", MOD)
        )
        e.lo, e.hi = within((num.lo, num.hi), (den.lo, den.hi))
        e.key, e._free = _bounded(f"[{order_key(num)}{sign}{order_key(den)}]"), None
        e = _DIVISIONS.setdefault((kind, num, den), e)
    return e


def extreme_node(kind: type[Min] | type[Max], args: Iterable[Sym]) -> Min | Max:
    """The interned min or max of two or more different args, not simplified."""
    found = tuple(sorted(args, key=order_key))
    e = _EXTREMES.get((kind, found))
    if e is None:
        e = object.__new__(kind)
        e.args = found
        limits = [(x.lo, x.hi) for x in found]
        e.lo, e.hi = bounds.smallest(limits) if kind is Min else bounds.largest(limits)
        inner = ",".join(x.key for x in found)
        e.key, e.mark, e._free = _bounded(f"{kind.__name__.lower()}({inner})"), 0, None
        e = _EXTREMES.setdefault((kind, found), e)
    return e


# The operators above need the rules, and the rules need the nodes: hence this cycle.
from lenz.sym import divide, recombine  # noqa: E402  a cycle, see above
