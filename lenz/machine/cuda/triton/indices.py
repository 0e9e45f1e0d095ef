"""Index arithmetic as Triton text, grouped so that the terms that vary least are added first.

Triton divides like C. If a numerator may be negative, the text rounds down explicitly, as `Sym`
does. Indices have 32 bits if every part of every index of the kernel is known to fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lenz.errors import InternalError
from lenz.ir.dtype import I32, I64, DType
from lenz.machine.cuda.triton.text import NO_DIMS, Dims, Term, Text
from lenz.sym import Add, FloorDiv, Int, Max, Min, Mod, Mul, Sym, Var
from lenz.sym.expr import children, subterms
from lenz.sym.prove import is_within

_LIMIT = 1 << 31


def fits(parts: Iterable[Sym]) -> bool:
    """True if 32 bits hold every part of every index."""

    def holds(s: Sym) -> bool:
        if not is_within(s, _LIMIT):
            return False
        if not isinstance(s, (FloorDiv, Mod)) or _is_plain(s):
            return True
        # The text that rounds down adds a divisor to a remainder and subtracts the result.
        n, d = [max(abs(x.lo or 0), abs(x.hi or 0)) for x in (s.num, s.den)]
        return d + max(n, d) < _LIMIT

    return all(map(holds, dict.fromkeys(subterms(*dict.fromkeys(parts)))))


class Indices:
    """Texts of Syms. `vars` gives the value of every loop variable and size."""

    def __init__(self, text: Text, wide: bool) -> None:
        self.text = text
        self.wide = wide
        self.cast = ".to(tl.int64)" if wide else ""  # of what Triton counts in i32
        self.vars: dict[Var, Term] = {}

    @property
    def dtype(self) -> DType:
        """The type of indices."""
        return I64 if self.wide else I32

    def term(self, s: Sym, bound: Mapping[Var, Term]) -> Term:
        """The value of an index; variables `@k` are found in `bound`."""
        match s:
            case Int():
                if -_LIMIT <= s.value < _LIMIT:
                    return Term(str(s.value) if s.value >= 0 else f"({s.value})")
                return Term(f"tl.full([], {s.value}, tl.int64)")
            case Var():
                found = bound.get(s) or self.vars.get(s)
                if found is None:
                    raise InternalError(f"{s.name} has no value here", pass_name="codegen")
                return found
            case Add():
                return self._sum(s, bound)
            case Mul():
                return _product([self.term(f, bound) for f in s.factors])
            case FloorDiv() | Mod() | Min() | Max():
                key = (s, tuple([bound[v].text for v in s.free_vars if v in bound]))
                return self.text.once(key, lambda: self._named(s, bound))
            case _:
                raise InternalError(f"no text for {type(s).__name__}", pass_name="codegen")

    def _named(self, s: FloorDiv | Mod | Min | Max, bound: Mapping[Var, Term]) -> Term:
        parts = [self.term(x, bound) for x in children(s)]
        dims, level = joint(parts)
        if isinstance(s, (Min, Max)):
            call = "tl.minimum" if isinstance(s, Min) else "tl.maximum"
            text = parts[0].text
            for p in parts[1:]:
                text = f"{call}({text}, {p.text})"
        else:
            text = _division(s, parts[0].text, parts[1].text)
        return self.text.let(text, dims, level)

    def _sum(self, s: Add, bound: Mapping[Var, Term]) -> Term:
        """Terms over the same lanes are grouped, those over fewer lanes first."""
        groups: dict[tuple[int, tuple[int, ...]], list[tuple[Term, int]]] = {}
        for t, c in s.terms:
            term = self.term(t, bound)
            groups.setdefault((len(term.dims), tuple(sorted(term.dims))), []).append((term, c))
        text = ""
        order = sorted(groups)
        if s.const and not (order and not order[0][0]):
            text = str(s.const)
        for key in order:
            own = ""
            for term, c in groups[key]:
                own += _signed(term.text, c, bool(own))
            if not key[0] and s.const:
                own += f" + {s.const}" if s.const > 0 else f" - {-s.const}"
            if not text:
                text = own
            elif own.startswith("-"):
                text = f"({text}) + ({own})"
            else:
                text = f"({text}) + {own}" if " " in text else f"{text} + {own}"
        dims, level = joint([t for g in groups.values() for t, _ in g])
        return Term(f"({text})", dims, level)


def joint(terms: Sequence[Term]) -> tuple[Dims, int]:
    """The dimensions and the level of a value made of the terms."""
    return NO_DIMS.union(*[t.dims for t in terms]), max([t.level for t in terms], default=0)


def _signed(text: str, c: int, inside: bool) -> str:
    sign = ("-" if c < 0 else "") if not inside else (" - " if c < 0 else " + ")
    return f"{sign}{text}" if abs(c) == 1 else f"{sign}{abs(c)} * {text}"


def _product(parts: list[Term]) -> Term:
    parts = sorted(parts, key=lambda t: len(t.dims))
    dims, level = joint(parts)
    return Term(f"({' * '.join([p.text for p in parts])})", dims, level)


def _is_plain(s: FloorDiv | Mod) -> bool:
    """True if C divides as `Sym` does: nothing is negative."""
    return s.num.lo is not None and s.num.lo >= 0 and s.den.lo is not None and s.den.lo > 0


def _division(s: FloorDiv | Mod, n: str, d: str) -> str:
    plain = _is_plain(s)
    if isinstance(s, Mod):
        return f"{n} % {d}" if plain else f"({n} % {d} + {d}) % {d}"
    return f"{n} // {d}" if plain else f"({n} - ({n} % {d} + {d}) % {d}) // {d}"
