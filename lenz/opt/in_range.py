"""Positions whose values prove that they are in range are neither wrapped nor checked.

    %p = map (i: 56) { minimum(maximum(load(%n, [i]), 0), 55) }
    %y = map (i: 56) { t = load(%p, [i])
        load(%x, [@0]; assert_in_range(where(lt(t, 0), add(t, 56), t), 56)) }
    ==>  %y = map (i: 56) { load(%x, [@0]; load(%p, [i])) }

Interpolation, reflection and the like compute positions from `arange` and clamp them. With checks,
images resized by bilinear interpolation took 1.2 times as long (f32, one core).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from lenz.context import Context
from lenz.ir.dtype import BOOL
from lenz.ir.expr import Expr, exact_place, interpret, keep_checks, rebuild
from lenz.ir.graph import LOOPS, Graph, Node, Pointwise, View, map_bodies
from lenz.ir.op import CONST, LOAD, Op
from lenz.ir.syntax import exprs_in
from lenz.ops.arith import ADD, MAXIMUM, MINIMUM, SUB
from lenz.ops.cast import CAST
from lenz.ops.check import CHECKS
from lenz.ops.compare import LT, WHERE
from lenz.opt.each import each
from lenz.sym import Sym, prove_lt

# The least and the greatest value of an integer, infinite where unknown, and a size or position
# that is not less than it, if one is known.
Range: TypeAlias = tuple[float, float, Sym | None]
ANY: Range = -math.inf, math.inf, None
GUARDS = frozenset(CHECKS.values())
# The least and the greatest result, from the least and the greatest values of the operands.
_ENDS: Mapping[Op, Callable[[list[float], list[float]], tuple[float, float]]] = {
    MINIMUM: lambda low, high: (min(low), min(high)),
    MAXIMUM: lambda low, high: (max(low), max(high)),
    ADD: lambda low, high: (low[0] + low[1], high[0] + high[1]),
    SUB: lambda low, high: (low[0] - high[1], high[0] - low[1]),
    WHERE: lambda low, high: (min(low[1:]), max(high[1:])),
    LT: lambda low, high: (high[0] < low[1], low[0] < high[1]),
    CAST: lambda low, high: (low[0], high[0]),
}


def in_range(g: Graph, cx: Context) -> Graph:
    """Drop checks of positions, and wraps of negative ones, that their values make needless."""
    known: dict[str, Range] = {}

    def told(e: Expr, args: list[tuple[Expr, Range]]) -> tuple[Expr, Range]:
        ranges = [r for _, r in args]
        e = rebuild(e, tuple(a for a, _ in args))
        if (kept := _kept(e, ranges)) is not None:
            return keep_checks(e.args[kept], e.args), ranges[kept]
        return e, _range(e, ranges, known)

    def visit(n: Node) -> Node:
        if isinstance(n, View):
            known[n.out.name] = known.get(n.source, ANY)
        if isinstance(n, LOOPS) and (n.out.dtype.is_integer or any(e.checks for e in exprs_in(n))):
            memo: dict[Expr, tuple[Expr, Range]] = {}
            made = map_bodies(n, lambda body: interpret(body, told, memo)[0])
            if isinstance(n, Pointwise):
                low, high, most = memo[n.body][1]  # a position of this loop says nothing elsewhere
                is_own = most is None or {a.var for a in n.axes}.intersection(most.free_vars)
                known[n.out.name] = low, high, None if is_own else most
            return made
        return n

    return each(g, visit)


def _kept(e: Expr, ranges: list[Range]) -> int | None:
    """The operand that the expression always equals; None if there is none."""
    if e.op in GUARDS and ranges[0][0] >= 0:
        (_, high, most), (low, _, size) = ranges
        is_below = most is not None and size is not None and prove_lt(most, size)
        return 0 if is_below or high < low else None
    if e.op is WHERE and ranges[0][0] == ranges[0][1]:
        return 1 if ranges[0][0] else 2
    return None


def _range(e: Expr, ranges: list[Range], known: Mapping[str, Range]) -> Range:
    if e.op is LOAD:
        return known.get(e.attrs[0], ANY)
    found, most = ANY[:2], ANY[2]
    if e.op is CONST:
        found = e.attrs[0], e.attrs[0]
    elif (most := exact_place(e)) is not None:
        found = -math.inf if most.lo is None else most.lo, math.inf if most.hi is None else most.hi
    elif e.op in _ENDS:
        found = _ENDS[e.op]([r[0] for r in ranges], [r[1] for r in ranges])
    if e.op in (MINIMUM, CAST):
        most = next((r[2] for r in ranges if r[2] is not None), None)
    if e.op in (ADD, SUB, CAST) and not e.dtype.holds(*found):
        return ANY  # it may wrap, or become True
    return (*found, most) if e.dtype.is_integer or e.dtype is BOOL else ANY
