"""What is known of the size variables of one graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lenz.sym.evaluate import evaluate, substitute
from lenz.sym.expr import Int, Sym, Var
from lenz.sym.prove import prove_divides


class ClosedError(RuntimeError):
    """A guard was added after `schedule` began, which may add none."""


@dataclass(frozen=True, slots=True)
class SymEnv:
    """The variables of a graph with their ranges, example values, facts and guards.

    Immutable: `with_*` gives a new one.

    ranges: the variables, ordered by name. hints: (name, example value) pairs. facts: (e, k) pairs
    that say k divides e, known without a guard. guards: conditions in text that the compiled result
    relies on, in order of addition, each once. is_closed: no guard may be added any more.
    """

    ranges: tuple[Var, ...] = ()
    hints: tuple[tuple[str, int], ...] = ()
    facts: tuple[tuple[Sym, int], ...] = ()
    guards: tuple[str, ...] = ()
    is_closed: bool = False

    def scope(self) -> Mapping[str, Var]:
        """Name -> variable, for `read_sym`."""
        return {v.name: v for v in self.ranges}

    def hint(self, e: Sym) -> int:
        """The value of e for the example sizes.

        A variable without a hint counts as its lowest value (at least 1).
        """
        if type(e) is Int:
            return e.value
        known = dict(self.hints)
        values: dict[Var, int] = {}
        for v in e.free_vars:
            fallback = max(1, v.lo or 0)
            values[v] = known.get(v.name, fallback if v.hi is None else min(fallback, v.hi))
        return evaluate(e, values)

    def is_multiple(self, e: Sym, k: int) -> bool:
        """True where k is proved to divide e, by ranges or by a fact."""
        if prove_divides(k, e):
            return True
        over: dict[Var, Sym] = {}  # a variable known to be a multiple of n is n times a variable
        for fact, n in self.facts:
            if type(fact) is Var and fact not in over:
                over[fact] = n * Var(f"{fact.name}.over")
        if over and prove_divides(k, substitute(e, over)):
            return True
        return any(n % k == 0 and prove_divides(k, e - fact) for fact, n in self.facts)

    def with_var(self, v: Var, hint: int | None = None) -> SymEnv:
        """With a variable more; one of the same name is replaced."""
        kept = [w for w in self.ranges if w.name != v.name]
        hints = dict(self.hints)
        if hint is not None:
            hints[v.name] = hint
        ranges = tuple(sorted([*kept, v], key=lambda w: w.name))
        return replace(self, ranges=ranges, hints=tuple(sorted(hints.items())))

    def with_fact(self, e: Sym, k: int) -> SymEnv:
        """With the fact that k divides e."""
        return self if (e, k) in self.facts else replace(self, facts=(*self.facts, (e, k)))

    def with_guard(self, text: str) -> SymEnv:
        """With a condition the result relies on. Raises ClosedError once closed."""
        if text in self.guards:
            return self
        if self.is_closed:
            raise ClosedError(f"guard {text!r} added after the environment was closed")
        return replace(self, guards=(*self.guards, text))

    def closed(self) -> SymEnv:
        """The same, with no further guard allowed."""
        return replace(self, is_closed=True)
