"""Facts about the size variables of one graph."""

from __future__ import annotations

from collections.abc import Mapping

from lenz.records import dataclass, replace
from lenz.sym.evaluate import guess
from lenz.sym.expr import Int, Sym, Var
from lenz.sym.prove import prove_lt


@dataclass(frozen=True, slots=True)
class SymEnv:
    """The variables of a graph with their ranges and example values.

    Immutable: `with_var` returns a new one. Compiled code relies on no other facts about sizes.

    ranges: the variables, ordered by name. hints: (name, example value) pairs. most: (name, upper
    bound) pairs that the plan checks in each call; only indices in GPU kernels rely on them.
    """

    ranges: tuple[Var, ...] = ()
    hints: tuple[tuple[str, int], ...] = ()
    most: tuple[tuple[str, int], ...] = ()

    def scope(self) -> Mapping[str, Var]:
        """Name -> variable, as readers of sizes take them."""
        return {v.name: v for v in self.ranges}

    def hint(self, e: Sym) -> int:
        """The value of e for the example sizes.

        A variable without a hint counts as its lower bound (at least 1).
        """
        if type(e) is Int:
            return e.value
        known = dict(self.hints)
        values: dict[Var, int] = {}
        for v in e.free_vars:
            fallback = max(1, v.lo or 0)
            values[v] = known.get(v.name, fallback if v.hi is None else min(fallback, v.hi))
        return guess(e, values)

    def is_positive(self, e: Sym) -> bool:
        """True for a size that is never 0. Torch guards which sizes of arguments are not."""
        given = {name for name, _ in self.hints}
        return prove_lt(0, e) or (
            given.issuperset(v.name for v in e.free_vars) and self.hint(e) > 0
        )

    def with_var(self, v: Var, hint: int | None = None) -> SymEnv:
        """With one more variable, which replaces one of the same name."""
        kept = [w for w in self.ranges if w.name != v.name]
        hints = dict(self.hints)
        if hint is not None:
            hints[v.name] = hint
        ranges = tuple(sorted([*kept, v], key=lambda w: w.name))
        return replace(self, ranges=ranges, hints=tuple(sorted(hints.items())))
