"""Split a CPU vector loop where its tests change, so that the part between borders has none.

    for p in 62 : vector { store(%y, [p], masked(p < 59, load(%x, [max(p, 3) - 3]), 0)) }
    ==>  for p in 3 : vector { store(%y, [p], load(%x, [0])) }
         for p in 56 : vector { store(%y, [p + 3], load(%x, [p])) }
         for p in 3 : vector { store(%y, [p + 59], 0) }

Tests are comparisons of positions, and min, max, quotients and remainders inside offsets, which
turn a load into a gather. Borders may be symbolic, if their order is proved: `n + 3` of `n + 6`, or
`i + 1` in row i of a triangle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from lenz import sym
from lenz.ir.dtype import BOOL
from lenz.ir.expr import Expr, const, interpret, is_bound_var, nodes_of, rebuild, syms_of
from lenz.ir.kernel import Store
from lenz.ir.op import MASKED
from lenz.ir.tensor import Axes, Axis, axis
from lenz.ops.bits import AND, NOT, OR
from lenz.ops.compare import EQ, GE, GT, LE, LT, NE, WHERE, sides_of
from lenz.ops.fold import apply, value_of
from lenz.schedule.cut import all_moved
from lenz.schedule.stages import Statement
from lenz.sym import ZERO, Int, Sym, SymEnv, Var, affine_in, maximum, product, prove_le
from lenz.sym.expr import subterms

WHOLE = 32  # smallest span that gets its own loop, in elements: two vectors of f32
LARGE = 4096  # or elements of a span with the axes inside: two rows of an image, say
# Limits for compile time: on spans between multiples, on all spans (parts of a `cat`), and on the
# nodes of all bodies.
MOST, SPANS, NODES = 6, 16, 400


def spans_of(
    v: Axis, inner: Axes, statements: Sequence[Statement], env: SymEnv
) -> list[tuple[Axis, list[Store]]]:
    """Axes for the spans of one inside which no test changes, with the statements over each.

    Decided tests are gone. The axes `inner` lie inside.
    """
    if any(not isinstance(s, Store) or s.bound or s.mode != "set" for s in statements):
        return []
    least = min(WHOLE, -(-LARGE // max(env.hint(product(a.extent for a in inner)), 1)))
    spans: list[tuple[Sym, Sym]] = []
    for start, end in _parts(v, ZERO, v.extent, inner, statements):
        # Short spans at a border stay one loop, which keeps its tests.
        if spans and env.hint(maximum(end - start, spans[-1][1] - spans[-1][0])) < least:
            start = spans.pop()[0]
        spans.append((start, end))
    loops = [_at(v, *span, statements) for span in spans if 1 < len(spans) <= SPANS]
    size = sum(len(nodes_of(*(s.value for s in stores))) for _, stores in loops)
    return loops if size <= NODES and any(env.hint(a.extent) >= least for a, _ in loops) else []


def _at(v: Axis, start: Sym, end: Sym, statements: Sequence[Statement]) -> tuple[Axis, list[Store]]:
    """An axis for a span of another one, and the statements over it without the decided tests."""
    part = axis(v.name, end - start)
    stores = [s for s in all_moved(statements, {v.var: part.var + start}) if isinstance(s, Store)]
    return part, [replace(s, value=resolved(s.value)) for s in stores]


def _parts(
    v: Axis, start: Sym, end: Sym, inner: Axes, statements: Sequence[Statement]
) -> list[tuple[Sym, Sym]]:
    """Split at the plain tests, then split the parts again, since tests may be nested."""
    if not inner and (end - start).hi in range(WHOLE):
        return [(start, end)]
    part, stores = _at(v, start, end, statements)
    ends, unknown = [start, end], {a.var for a in inner}
    for d in _tests(stores):
        t = start + _turn(d, part.var)
        if t not in ends and not any(x in unknown or is_bound_var(x) for x in t.free_vars):
            # A border of unknown place among the others, or perhaps outside, splits nothing.
            is_after = [prove_le(x, t) for x in ends]
            k = is_after.index(False) if False in is_after else len(ends)
            if 0 < k < len(ends) and prove_le(t, ends[k]):
                ends.insert(k, t)
    if not 2 < len(ends) <= SPANS + 1:
        return [(start, end)]
    return [p for first, last in pairwise(ends) for p in _parts(v, first, last, inner, statements)]


def _tests(stores: Sequence[Store]) -> Iterator[Sym]:
    """Numbers whose sign decides a comparison (d >= 0), or the side of a min or max.

    For a quotient or remainder by a constant: the multiples between which the number lies.
    """
    nodes = nodes_of(*(s.value for s in stores))
    for e in nodes:
        if sides := sides_of(e, *_HOLDS):
            a, b = sides
            up = {LE: (b - a,), LT: (b - a - 1,), GE: (a - b,), GT: (a - b - 1,)}
            yield from up.get(e.op, (a - b, b - a))
    for s in subterms(*[s.offset for s in stores], *[s for e in nodes for s in syms_of(e)]):
        if isinstance(s, (sym.Min, sym.Max)):
            yield from (a - b for a, b in combinations(sym.children(s), 2))
        elif isinstance(s, (sym.FloorDiv, sym.Mod)):
            a, n = sym.children(s)
            if isinstance(n, Int) and a.lo is not None and a.hi is not None:
                first, last = a.lo // n.value + 1, a.hi // n.value
                if last - first < MOST - 1:
                    yield from (a - n * k for k in range(first, last + 1))


def _turn(d: Sym, v: Var) -> Sym:
    """The first v at which the answer to d >= 0 changes, for d = c * v + r; else 0."""
    c, r = affine_in(d, v) or (ZERO, ZERO)
    if not isinstance(c, Int) or c is ZERO:
        return ZERO
    return -(r // c) if c.value > 0 else r // -c + 1


_HOLDS = {
    LE: (prove_le, lambda a, b: sym.prove_lt(b, a)),
    LT: (sym.prove_lt, lambda a, b: prove_le(b, a)),
    GE: (lambda a, b: prove_le(b, a), sym.prove_lt),
    GT: (lambda a, b: sym.prove_lt(b, a), prove_le),
    EQ: (sym.prove_eq, lambda a, b: sym.prove_lt(a, b) or sym.prove_lt(b, a)),
    NE: (lambda a, b: sym.prove_lt(a, b) or sym.prove_lt(b, a), sym.prove_eq),
}


def is_test(e: Expr) -> bool:
    """True for a comparison of positions."""
    return sides_of(e, *_HOLDS) is not None


def resolved(body: Expr) -> Expr:
    """The body without tests that are proved true or false: the chosen value replaces each."""

    def visit(e: Expr, args: list[Expr]) -> Expr:
        new = rebuild(e, tuple(args))
        if sides := sides_of(new, *_HOLDS):
            for answer, proves in zip((True, False), _HOLDS[e.op], strict=True):
                if proves(*sides):
                    return const(answer, BOOL)
        if e.op is MASKED and (chosen := value_of(args[0])) is not None:
            return args[1] if chosen else args[2]
        is_logic = e.op in (AND, OR, NOT, WHERE) and new is not e
        return apply(e.op, *args, attrs=e.attrs) if is_logic else new

    return interpret(body, visit)
