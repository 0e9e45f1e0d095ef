"""Positions whose values prove that they are in range are neither wrapped nor checked.

    %p = map (i: 56) { minimum(maximum(load(%n, [i]), 0), 55) }
    %y = map (i: 56) { t = load(%p, [i])
        load(%x, [@0]; assert_in_range(where(lt(t, 0), add(t, 56), t), 56)) }
    ==>  %y = map (i: 56) { load(%x, [@0]; load(%p, [i])) }

Interpolation, reflection and the like compute positions from `arange` and clamp them. With checks,
images resized by bilinear interpolation took 1.2 times as long (f32, one core).

Sums, products, quotients and remainders of indices are indices, so that reads at them are no
gathers: a roll of a list by `x[(arange(n) + 5) % n]` takes 0.65 of the time (f32, one core).

    load(%x, [@0, j]; remainder(add(index(i), 5), 1000))  ==>  load(%x, [(i + 5) % 1000, j])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import add, floordiv, mod, mul, sub
from typing import TypeAlias

from lenz.context import Context
from lenz.ir.dtype import BOOL
from lenz.ir.expr import Expr, exact_place, index, interpret, keep_checks, rebuild
from lenz.ir.graph import LOOPS, Graph, Node, Pointwise, View, map_bodies
from lenz.ir.op import CONST, LOAD, Op
from lenz.ir.syntax import exprs_in
from lenz.ops.arith import ADD, MAXIMUM, MINIMUM, MUL, SUB
from lenz.ops.cast import CAST
from lenz.ops.check import CHECKS
from lenz.ops.compare import LT, WHERE
from lenz.ops.division import DIV_FLOOR, REMAINDER
from lenz.opt.each import each
from lenz.opt.inline import value_at
from lenz.sym import Int, Sym, prove_lt, sym

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

# Arithmetic of integers as that of indices; divisors are above 0.
_EXACT: Mapping[Op, Callable[..., Sym]] = {
    ADD: add, SUB: sub, MUL: mul, DIV_FLOOR: floordiv, REMAINDER: mod, CAST: sym,
}  # fmt: skip


def in_range(g: Graph, cx: Context) -> Graph:
    """Drop checks of positions, and wraps of negative ones, that their values make needless."""
    known: dict[str, Range] = {}
    places: dict[str, Pointwise] = {}

    def told(e: Expr, args: list[tuple[Expr, Range]]) -> tuple[Expr, Range]:
        ranges = [r for _, r in args]
        e = _exact(rebuild(e, tuple(a for a, _ in args)), places)
        if (kept := _kept(e, ranges)) is not None:
            return keep_checks(e.args[kept], e.args), ranges[kept]
        return e, _range(e, ranges, known)

    def visit(n: Node) -> Node:
        if isinstance(n, View):
            known[n.out.name] = known.get(n.source, ANY)
        if isinstance(n, LOOPS) and (n.out.dtype.is_integer or any(e.checks for e in exprs_in(n))):
            memo: dict[Expr, tuple[Expr, Range]] = {}
            made = map_bodies(n, lambda body: interpret(body, told, memo)[0])
            if isinstance(n, Pointwise) and isinstance(made, Pointwise):
                if _index(made.body) is not None:
                    places[n.out.name] = made
                low, high, most = memo[n.body][1]  # a position of this loop says nothing elsewhere
                is_own = most is None or {a.var for a in n.axes}.intersection(most.free_vars)
                known[n.out.name] = low, high, None if is_own else most
            return made
        return n

    return each(g, visit)


def _index(e: Expr) -> Sym | None:
    """The index that an integer always equals; None if there is none."""
    return Int(e.attrs[0]) if e.op is CONST and e.dtype.is_integer else exact_place(e)


def _exact(e: Expr, places: Mapping[str, Pointwise]) -> Expr:
    """The expression as an index, if it always equals one; `places` are tensors of such."""
    if e.op is LOAD and (n := places.get(e.attrs[0])) is not None:
        return value_at(n, e)
    of = [i for i in map(_index, e.args) if i is not None]
    is_exact = e.op in _EXACT and e.dtype.is_integer and len(of) == len(e.args)
    if not is_exact or (e.op in (DIV_FLOOR, REMAINDER) and (of[1].lo or 0) < 1):
        return e
    s = _EXACT[e.op](*of)
    is_held = s.lo is not None and s.hi is not None and e.dtype.holds(s.lo, s.hi)
    return index(s, e.dtype) if is_held else e


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
