"""Split a CPU vector loop where its tests change, so that the part between borders has none.

    for p in 62 : vector { store(%y, [p], masked(p < 59, load(%x, [max(p, 3) - 3]), 0)) }
    ==>  for p in 3 : vector { store(%y, [p], load(%x, [0])) }
         for p in 56 : vector { store(%y, [p + 3], load(%x, [p])) }
         for p in 3 : vector { store(%y, [p + 59], 0) }

Tests are comparisons of positions, and min, max, quotients and remainders inside offsets, which
turn a load into a gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from lenz import sym
from lenz.ir.dtype import BOOL
from lenz.ir.expr import Expr, const, interpret, nodes_of, rebuild, syms_of
from lenz.ir.kernel import Store
from lenz.ir.op import INDEX, MASKED
from lenz.ir.tensor import Axis, axis
from lenz.ops.bits import AND, NOT, OR
from lenz.ops.compare import EQ, GE, GT, LE, LT, NE, WHERE
from lenz.ops.fold import apply, value_of
from lenz.schedule.cut import all_moved
from lenz.schedule.stages import Statement
from lenz.sym import Int, Sym, Var

WHOLE = 32  # smallest span that gets its own loop, in elements: two vectors of f32
MOST, NODES = 6, 400  # limits on spans, and on nodes in all copies of the body, for compile time


def spans_of(v: Axis, statements: Sequence[Statement]) -> list[tuple[int, int]]:
    """The spans first <= v < end of an axis inside which no test changes."""
    if not isinstance(v.extent, Int) or not all(isinstance(s, Store) for s in statements):
        return []
    if any(isinstance(s, Store) and (s.bound or s.mode != "set") for s in statements):
        return []
    spans: list[tuple[int, int]] = []
    for start, end in _parts(v, 0, v.extent.value, statements):
        # Short spans at a border stay one loop, which keeps its tests.
        if spans and max(end - start, spans[-1][1] - spans[-1][0]) < WHOLE:
            start = spans.pop()[0]
        spans.append((start, end))
    size = len(spans) * len(nodes_of(*(s.value for s in statements)))
    fits = 1 < len(spans) <= MOST and size <= NODES
    return spans if fits and any(end - start >= WHOLE for start, end in spans) else []


def at(v: Axis, start: int, end: int, statements: Sequence[Statement]) -> tuple[Axis, list[Store]]:
    """An axis for a span of another one, and the statements over it without the decided tests."""
    part = axis(v.name, Int(end - start))
    stores = [s for s in all_moved(statements, {v.var: part.var + start}) if isinstance(s, Store)]
    return part, [replace(s, value=resolved(s.value)) for s in stores]


def _parts(v: Axis, start: int, end: int, statements: Sequence[Statement]) -> list[tuple[int, int]]:
    """Split at the plain tests, then split the parts again, since tests may be nested."""
    part, stores = at(v, start, end, statements)
    turns = {t + start for d in _tests(stores) if (t := _turn(d, part.var)) is not None}
    inside = [t for t in sorted(turns) if start < t < end]
    if not inside or len(inside) > 2 * MOST or end - start < WHOLE:
        return [(start, end)]
    spans = pairwise([start, *inside, end])
    return [p for first, last in spans for p in _parts(v, first, last, statements)]


def _tests(stores: Sequence[Store]) -> Iterator[Sym]:
    """Numbers whose sign decides a comparison (d >= 0), or the side of a min or max.

    For a quotient or remainder by a constant: the multiples between which the number lies.
    """
    nodes = nodes_of(*(s.value for s in stores))
    for e in nodes:
        if is_test(e):
            a, b = (x.attrs[0] for x in e.args)
            up = {LE: (b - a,), LT: (b - a - 1,), GE: (a - b,), GT: (a - b - 1,)}
            yield from up.get(e.op, (a - b, b - a))
    todo = [s.offset for s in stores] + [s for e in nodes for s in syms_of(e)]
    for s in todo:
        if isinstance(s, (sym.Min, sym.Max)):
            yield from (a - b for a, b in combinations(sym.children(s), 2))
        elif isinstance(s, (sym.FloorDiv, sym.Mod)):
            a, n = sym.children(s)
            if isinstance(n, Int) and a.lo is not None and a.hi is not None:
                first, last = a.lo // n.value + 1, a.hi // n.value
                # One more than `_parts` accepts: it would split off only a few of a thousand
                # multiples.
                yield from (a - n * k for k in range(first, min(last, first + 2 * MOST) + 1))
        todo.extend(sym.children(s))


def _turn(d: Sym, v: Var) -> int | None:
    """The first v at which the answer to d >= 0 changes, for d = c * v + r."""
    parts = sym.affine_in(d, v)
    if parts is None or not all(isinstance(x, Int) for x in parts):
        return None
    c, r = (x.value for x in parts if isinstance(x, Int))
    return None if c == 0 else -(r // c) if c > 0 else r // -c + 1


_HOLDS = {
    LE: (sym.prove_le, lambda a, b: sym.prove_lt(b, a)),
    LT: (sym.prove_lt, lambda a, b: sym.prove_le(b, a)),
    GE: (lambda a, b: sym.prove_le(b, a), sym.prove_lt),
    GT: (lambda a, b: sym.prove_lt(b, a), sym.prove_le),
    EQ: (sym.prove_eq, lambda a, b: sym.prove_lt(a, b) or sym.prove_lt(b, a)),
    NE: (lambda a, b: sym.prove_lt(a, b) or sym.prove_lt(b, a), sym.prove_eq),
}


def is_test(e: Expr) -> bool:
    """True for a comparison of positions."""
    return e.op in _HOLDS and all(x.op is INDEX and not x.args for x in e.args)


def resolved(body: Expr) -> Expr:
    """The body without tests that are proved true or false: the chosen value replaces each."""

    def visit(e: Expr, args: list[Expr]) -> Expr:
        if e.op in _HOLDS and all(x.op is INDEX and not x.args for x in args):
            a, b = (x.attrs[0] for x in args)
            for answer, proves in zip((True, False), _HOLDS[e.op], strict=True):
                if proves(a, b):
                    return const(answer, BOOL)
        if e.op is MASKED and (chosen := value_of(args[0])) is not None:
            return args[1] if chosen else args[2]
        new = rebuild(e, tuple(args))
        is_logic = e.op in (AND, OR, NOT, WHERE) and new is not e
        return apply(e.op, *args, attrs=e.attrs) if is_logic else new

    return interpret(body, visit)
