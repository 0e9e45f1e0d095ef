"""Apply a mask along a row only to the loads that need it, on GPUs.

    map (i: N, j: 16) { masked(j < 13, div(load(%x, [i, j]), load(%s, [i])), 0) }
    ==>  where(j < 13, div(masked(j < 13, load(%x, [i, j]), 0), load(%s, [i])), 0)

Under the mask each lane would load its own number and compute with it. A load whose index has none
of the mask's variables is safe for all elements of the row if it is safe for one. And if %x has 16
columns, it may be loaded up to there, 16 bytes at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import reduce

from lenz import ops
from lenz.context import Context
from lenz.ir import expr
from lenz.ir.expr import Expr
from lenz.ir.graph import Graph, Loop, Reduction, buffers_of, map_bodies
from lenz.ir.op import MASKED
from lenz.ops.bits import AND
from lenz.ops.compare import LE, LT, sides_of
from lenz.opt.each import each_on_gpus
from lenz.sym import ZERO, Int, Sym, Var

UNIT = 8  # elements of a half type in 16 bytes


def unmask(g: Graph, cx: Context) -> Graph:
    """Move masks along rows down to the loads that need them."""
    shapes = {name: b.shape for name, b in buffers_of(g).items()}
    return each_on_gpus(g, lambda n: _unmasked(n, shapes))


def _unmasked(n: Loop, shapes: Mapping[str, tuple[Sym, ...]]) -> Loop:
    # Rows of a reduction lie along its last axis, even where its result keeps no axis for them.
    row = n.raxes if isinstance(n, Reduction) else n.axes
    inner, memo = {a.var for a in row[-1:]}, dict[Expr, Expr]()
    new = lambda e: _lowered(e, inner, shapes) if e.op is MASKED else e
    return map_bodies(n, lambda body: expr.rewritten(body, new, memo))


def _lowered(e: Expr, inner: Set[Var], shapes: Mapping[str, tuple[Sym, ...]]) -> Expr:
    """A masked value with its position tests moved to its loads, if one of them gains by it."""
    cond, value, other = e.args
    tests = tests_of(cond)
    rows = {t: s for t in tests if (s := _own_place(t, tests)) is not None}
    loads = expr.loads_of(value)
    if any(x.op.guarded for x in expr.nodes_of(value)):
        return e
    kept = {x: [_for_load(t, s, x, inner, shapes) for t, s in rows.items()] for x in loads}
    if all(list(rows) == new for new in kept.values()):
        return e

    def at_load(x: Expr) -> Expr | None:
        new = [_for_load(t, s, x, inner, shapes) for t, s in rows.items()]
        held = [t for t in new if t is not None]
        return expr.masked(reduce(ops.and_, held), x, expr.const(0, x.dtype)) if held else None

    value = expr.replace_loads(value, at_load)
    rest = [t for t in tests if t not in rows]
    value = expr.masked(reduce(ops.and_, rest), value, other) if rest else value
    return ops.where(reduce(ops.and_, rows), value, other)


def _for_load(
    test: Expr, place: Sym, x: Expr, inner: Set[Var], shapes: Mapping[str, tuple[Sym, ...]]
) -> Expr | None:
    """The test that remains for one load: none, the same, or the end of the padded row."""
    if isinstance(place, Var) and not x.args and not expr.vars_of(x) & {place, *inner}:
        return None
    end = -(-test.args[1].attrs[0].value // UNIT) * UNIT
    own = frozenset(place.free_vars)
    moved = [k for k, s in enumerate(x.attrs[1]) if own.intersection(s.free_vars)]
    if len(moved) != 1 or x.attrs[1][moved[0]] is not place:
        return test  # the test is one of another dimension as well
    if shapes[x.attrs[0]][moved[0]] is not Int(end):
        return test
    if place.hi is not None and place.hi < end:
        return None
    return test.args[0] < expr.index(Int(end), test.args[0].dtype)


def tests_of(cond: Expr) -> list[Expr]:
    """The conditions that must all hold."""
    return [t for a in cond.args for t in tests_of(a)] if cond.op is AND else [cond]


def spare_of(test: Expr) -> Sym | None:
    """A number that is at least 0 exactly if a comparison of two positions holds; else None."""
    sides = sides_of(test, LT, LE)
    return None if sides is None else sides[1] - sides[0] - (test.op is LT)


def _own_place(test: Expr, tests: list[Expr]) -> Sym | None:
    """The position s of a test s < n that holds for 0 and shares no variable with another test."""
    s, n = sides_of(test, LT) or (ZERO, ZERO)
    others = expr.vars_of(*(t for t in tests if t is not test))
    if not isinstance(n, Int) or n.value < 1 or s.lo != 0 or expr.vars_of(test) & others:
        return None
    return s
