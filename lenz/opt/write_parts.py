"""Write the part of an argument that a graph changes, and not all of it.

    map (i: 8, j: 1000) { masked(and(le(4, j), lt(j, 6)), %new, load(%x, [i, j])) }; mutate %x
    ==>  scatter set (i: 8, j: 2) (%x, [i, j + 4]) { %new at j + 4 }

The map would read and write the whole argument: all of a cache, where each call fills one row. A
scatter works in the argument's memory, so new values that read an argument are stored first, unless
they read the element that they replace.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from lenz.context import Context
from lenz.debug.blame import blaming
from lenz.ir.axes import old_reads
from lenz.ir.expr import Expr, load, nodes_of, reindex
from lenz.ir.graph import Graph, Node, Pointwise, Scatter, atom_refs, reads_of
from lenz.ir.op import MASKED
from lenz.ir.tensor import Axes, Axis, Buffer, axis, contiguous
from lenz.ops.compare import EQ, WHERE, sides_of
from lenz.opt.unmask import spare_of, tests_of
from lenz.records import replace
from lenz.sym import ONE, ZERO, Sym, SymEnv, affine_in, product, prove_le

# A map has vectors, and a scatter writes single elements. A part has at most 1/PART of them all.
PART = 4


def write_parts(g: Graph, cx: Context) -> Graph:
    """Write the parts of arguments that maps change, behind all readers of the old elements."""
    returned = {*atom_refs(g.outputs)}
    inputs = {m.value: m.input for m in g.mutations if m.value not in returned}
    written = {*inputs.values()}
    last = {name: k for k, n in enumerate(g.nodes) for name in reads_of(n)} if inputs else {}
    nodes, writes = list[Node](), list[Node]()
    for k, n in enumerate(g.nodes):
        if not isinstance(n, Pointwise) or (base := inputs.get(n.out.name)) is None:
            nodes.append(n)
            continue
        with blaming(n):
            stored, parts = _part(n, base, written, g.env) or ([n], [])
        if n.out.name not in last:
            writes += parts
        elif last.get(base, 0) <= k:
            stored += parts
        else:
            stored = [n]
        nodes += stored
    return replace(g, nodes=(*nodes, *writes))


def _part(
    n: Pointwise, base: str, written: Set[str], env: SymEnv
) -> tuple[list[Node], list[Scatter]] | None:
    """The new values to store first, and the writes; None if other elements may change."""
    own = load(base, [ZERO if a.extent is ONE else a.var for a in n.axes], n.out.dtype)
    found, rest, size = list[tuple[Axes, tuple[Sym, ...], Expr]](), n.body, 0
    while rest is not own:
        layer = _layer(rest, own)
        ends = [layer and _ends(a, layer[0], n.axes) for a in n.axes]
        if layer is None or not all(ends):
            return None
        axes = tuple(axis(a.name, e[1] - e[0]) for a, e in zip(n.axes, ends, strict=True) if e)
        at = {a.var: e[0] + x.var for a, e, x in zip(n.axes, ends, axes, strict=True) if e}
        found.append((axes, tuple(at.values()), reindex(layer[1], at)))
        size += env.hint(product(a.extent for a in axes))
        rest = rest.args[2]
    # Nothing is written to an argument before the checks of the new values have passed.
    is_checked = any(e.op.guarded for *_, value in found for e in nodes_of(value))
    if not found or is_checked or PART * size > env.hint(product(n.out.shape)):
        return None
    first, then = list[Node](), list[Scatter]()
    for k, (axes, index, value) in reversed([*enumerate(found)]):
        out = replace(n.out, name=f"{n.out.name}.{k}") if k else n.out
        put = Scatter(out, then[-1].out.name if then else base, axes, index, (), value)
        if not written.isdisjoint(old_reads(put)):
            layout = contiguous([a.extent for a in axes])
            part = Buffer(f"{n.out.name}.part{k}", replace(n.out.type, layout=layout), n.out.origin)
            first.append(Pointwise(part, axes, value))
            put = replace(put, value=load(part.name, [a.var for a in axes], part.dtype))
        then.append(put)
    return first, then


def _layer(e: Expr, own: Expr) -> tuple[list[Expr], Expr] | None:
    """The tests of a part and its new value, where the rest is e.args[2]; None for other values."""
    tests = tests_of(e.args[0]) if e.op in (MASKED, WHERE) else []
    if not tests or not all(map(_spares, tests)):
        return None
    value = e.args[1]
    inner = _layer(value, own) if all(x.args[2:] == (own,) for x in (e, value)) else None
    return (tests + inner[0], inner[1]) if inner else (tests, value)


def _spares(test: Expr) -> list[Sym]:
    """Numbers that are all >= 0 if and only if positions compare so; none for other tests."""
    if sides := sides_of(test, EQ):
        return [sides[1] - sides[0], sides[0] - sides[1]]
    return [] if (spare := spare_of(test)) is None else [spare]


def _ends(x: Axis, tests: Sequence[Expr], axes: Axes) -> tuple[Sym, Sym] | None:
    """The first position of an axis in the part, and the end; None if they are not known."""
    first: list[Sym] = [ZERO]
    end, own = [x.extent], {a.var for a in axes}
    for s in dict.fromkeys(s for test in tests for s in _spares(test)):
        step, rest = affine_in(s, x.var) or (None, s)
        if step is None or (step is not ZERO and not own.isdisjoint(rest.free_vars)):
            return None
        if step is ONE:
            first.append(-rest)
        elif step is -ONE:
            end.append(rest + 1)
        elif step is not ZERO or ({*s.free_vars}.isdisjoint(own) and not prove_le(ZERO, s)):
            return None  # a test of sizes alone restricts no axis
    low, high = _latest(first), _latest([-e for e in end])
    if low is None or high is None or (-high - low).lo is None or (-high - low).lo < 0:
        return None
    return low, -high


def _latest(found: Sequence[Sym]) -> Sym | None:
    """The greatest of some numbers, if that is known of all values of sizes."""
    for s in found:
        if all((d := (s - other).lo) is not None and d >= 0 for other in found):
            return s
    return None
