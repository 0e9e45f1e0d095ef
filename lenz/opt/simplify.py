"""Algebra on scalar expressions that looks beyond one node; the rules are in a table.

The right side of a rule is never slower than the left, and its result is at least as accurate for
every value that a program can observe.
"""

from __future__ import annotations

from collections.abc import Callable

from lenz import ops
from lenz.context import Context
from lenz.ir.dtype import F32
from lenz.ir.expr import Expr, interpret, rebuild
from lenz.ir.graph import LOOPS, Graph, map_bodies
from lenz.ir.op import INDEX, LOAD, MASKED
from lenz.ops.arith import ADD
from lenz.ops.fold import apply
from lenz.ops.math import ERF
from lenz.opt.each import each
from lenz.records import dataclass


@dataclass(frozen=True, slots=True)
class Rewrite:
    """`rewrite` gives the right side for a node that matches `equation`'s left side, or None."""

    name: str
    equation: str
    rewrite: Callable[[Expr], Expr | None]


def _one_plus_erf(e: Expr) -> Expr | None:
    if e.op is not ADD or e.dtype is not F32:
        return None
    x, one = e.args
    if x.op is ERF and ops.is_value(one, 1.0):
        return ops.one_plus_erf(x.args[0])
    return None


ACCESSES = (LOAD, INDEX, MASKED)

RULES: tuple[Rewrite, ...] = (
    # Half of erf's polynomials serve its relative accuracy near zero, which the sum discards.
    Rewrite("one_plus_erf", "erf(x) + 1 = one_plus_erf(x)", _one_plus_erf),
)


def simplify(g: Graph, cx: Context) -> Graph:
    """Apply the rules, and those of `ops.fold`, to every body."""
    memo: dict[Expr, Expr] = {}

    def visit(e: Expr, args: list[Expr]) -> Expr:
        if not args or e.op in ACCESSES:
            return rebuild(e, tuple(args))
        new = apply(e.op, *args, attrs=e.attrs)  # inlining has brought operands together
        for rule in RULES:
            found = rule.rewrite(new)
            if found is not None and cx.allow("simplify", rule.name):
                return found
        return new

    def simpler(e: Expr) -> Expr:
        return interpret(e, visit, memo)

    return each(g, lambda n: map_bodies(n, simpler) if isinstance(n, LOOPS) else n)
