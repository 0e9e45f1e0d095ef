"""Graph -> Schedule: flat loops, fusion, order, loop forms. All decisions become data."""

from __future__ import annotations

from dataclasses import replace

from lenz.context import Context
from lenz.debug.blame import blaming
from lenz.ir import graph as ir
from lenz.ir.expr import loads_of
from lenz.ir.kernel import Launch, Schedule
from lenz.ir.tensor import Buffer
from lenz.machines import Space
from lenz.schedule.build import build
from lenz.schedule.fuse import Cell, Item, fuse
from lenz.schedule.legal import Group
from lenz.schedule.nest import Nest, nest_of
from lenz.schedule.order import order
from lenz.schedule.pairs import nests_of
from lenz.schedule.scatter import homes, parts_of
from lenz.sym import ZERO


def schedule(g: ir.Graph, cx: Context, space: Space | None = None) -> Schedule:
    """Fuse the loops of a graph into kernels and put kernels, calls and views in order.

    Launches keep candidate kernels, one for each shape that their machine, or `space`, would time.
    """
    buffers = ir.buffers_of(g)
    layouts = {name: b.type.layout for name, b in buffers.items()}
    roots = ir.roots_of(g.nodes)
    items: list[Item] = []
    home = homes(g, layouts)
    roots = {**{name: home.get(root, root) for name, root in roots.items()}, **home}
    for n in g.nodes:
        with blaming(n):
            if isinstance(n, ir.Scatter):
                items.extend(parts_of(n, home.get(n.out.name, n.out.name), buffers, roots))
            elif isinstance(n, (ir.Extern, ir.View)):
                renamed = ir.rename_reads(n, home)
                assert isinstance(renamed, (ir.Extern, ir.View))
                items.append(renamed)
            else:
                items.extend(nests_of(n, layouts, roots))
    for m in g.mutations:
        if home.get(m.value) != m.input:
            items.append(_write_back(m.input, m.value, buffers, roots))
    partition = fuse(items, g.env, cx)
    cells = order(partition, buffers, ir.returned_by(g))
    stored = _stored(g, cells)
    unaligned = _unaligned(g, cx)
    steps: list[Launch | ir.Extern | ir.View] = []
    made: dict[object, Launch] = {}
    for cell in cells:
        if isinstance(cell, Group):
            if any(n.name in stored for n in cell.nests):
                with blaming(cell.nests[-1].out):
                    steps.append(build(cell, stored, buffers, unaligned, g.env, cx, space, made))
        else:
            steps.append(cell)
    return Schedule(g, tuple(steps), tuple(partition.rejected))


def _write_back(target: str, value: str, buffers: dict[str, Buffer], roots: dict[str, str]) -> Nest:
    """The mutation `target` <- `value` as a nest, which can fuse with the producer of the value."""
    into, source = buffers[target], buffers[value]
    out = replace(into, name=f"{target}.new", origin=source.origin)
    return nest_of(ir.copying(value, out), {value: source.type.layout}, roots, target)


def _unaligned(g: ir.Graph, cx: Context) -> frozenset[str]:
    """Buffers without a known alignment: inputs and results of calls that are parts of others."""
    found = set(g.unaligned)
    strange = {b.name for b in g.inputs if isinstance(b, Buffer)}
    if not cx.options.aligned:
        found |= strange
    for n in g.nodes:
        if isinstance(n, ir.View):
            if n.out.type.layout.offset is not ZERO or n.source in strange or n.source in found:
                strange.add(n.out.name)
        elif isinstance(n, ir.Extern) and n.aliases:
            # Our own memory stays where it is when a call writes it or waits for it.
            where = {b for _, b in n.aliases} - strange - found
            kept = {k for k, b in n.aliases if b in where and (b in n.mutates or n.waits)}
            outs = [n.outs[k] for k, _ in n.aliases if k < len(n.outs) and k not in kept]
            found |= {o.name for o in outs if isinstance(o, Buffer)}
    return frozenset(found)


def _stored(g: ir.Graph, cells: list[Cell]) -> frozenset[str]:
    """Values that are read outside of their cell, returned, written back to inputs, or checked."""
    names = {*ir.atom_refs(g.outputs)}
    read = {r for n in g.nodes for r in ir.reads_of(n)}
    for cell in cells:
        if isinstance(cell, Group):
            own = {n.name for n in cell.nests}
            names |= {n.name for n in cell.nests if n.name not in read and n.checks}
            for n in cell.nests:
                if n.target != n.name:
                    names |= {n.name, n.target} if n.updates else {n.name}
                names |= {r for r in _reads(n) if r not in own}
        else:
            names |= set(ir.reads_of(cell))
    return frozenset(names)


def _reads(n: Nest) -> set[str]:
    return {e.attrs[0] for e in loads_of(*n.exprs)}
