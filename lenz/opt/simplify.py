"""Algebra on scalar expressions that looks beyond one node; the rules are in a table.

The right side of a rule is never slower than the left, and its result is at least as accurate for
every value that a program can observe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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


def _one_plus_erf(e: Expr) -> Expr | None:
    """erf(x) + 1: half of erf's polynomials serve accuracy near 0, which the sum discards."""
    if e.op is not ADD or e.dtype is not F32:
        return None
    x, one = e.args
    return ops.one_plus_erf(x.args[0]) if x.op is ERF and ops.is_value(one, 1.0) else None


# The right side of an equation by its name, for a node that matches its left side.
RULES: Mapping[str, Callable[[Expr], Expr | None]] = {"one_plus_erf": _one_plus_erf}


def simplify(g: Graph, cx: Context) -> Graph:
    """Apply the rules, and those of `ops.fold`, to every body."""
    memo: dict[Expr, Expr] = {}

    def visit(e: Expr, args: list[Expr]) -> Expr:
        if not args or e.op in (LOAD, INDEX, MASKED):
            return rebuild(e, tuple(args))
        new = apply(e.op, *args, attrs=e.attrs)  # inlining has brought operands together
        for name, rule in RULES.items():
            if (found := rule(new)) is not None and cx.allow("simplify", name):
                return found
        return new

    def simpler(e: Expr) -> Expr:
        return interpret(e, visit, memo)

    return each(g, lambda n: map_bodies(n, simpler) if isinstance(n, LOOPS) else n)
