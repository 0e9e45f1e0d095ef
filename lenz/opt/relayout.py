"""Give intermediate results of loops the memory layout of their readers' results.

    %a = map {..};  %y = f32[2, 3, 4 : 12, 1, 3] : map (i, j, k) { load(%a, [i, j, k]) }
    ==>  %a = f32[2, 3, 4 : 12, 1, 3] : map {..}

Nothing else observes this layout. The loops then run in one order and fuse: a bilinear
interpolation of images with channels last took 8.8 ms in two kernels, one of them a transpose, and
1.0 ms in one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lenz.context import Context
from lenz.ir import graph as ir
from lenz.ir.expr import loads_of
from lenz.ir.tensor import Layout
from lenz.opt.each import each


def relayout(g: ir.Graph, cx: Context) -> ir.Graph:
    """Walk from the last node to the first: a chain of loops adopts the last one's order."""
    seen = {*ir.atom_refs(g.outputs)} | {m.value for m in g.mutations}
    wanted: dict[str, set[Layout] | None] = {}

    def moved(n: ir.Node) -> ir.Node:
        if isinstance(n, (ir.Pointwise, ir.Reduction)) and n.out.name not in seen:
            n = _moved(n, wanted.get(n.out.name))
        elif isinstance(n, ir.Scatter) and n.out.name not in seen and wanted.get(n.out.name):
            n = _like_its_values(n, {b.name: b.type.layout for b in ir.buffers_of(g).values()})
        same = _read_in_place(n) if isinstance(n, ir.Pointwise) else frozenset()
        for name in ir.reads_of(n):
            layouts = wanted.setdefault(name, set())
            if layouts is not None:
                wanted[name] = layouts | {n.out.type.layout} if name in same else None  # type: ignore[union-attr]  # readers in place are Pointwise
        return n

    return each(g, moved, last_first=True)


def _moved(n: ir.Pointwise | ir.Reduction, into: set[Layout] | None) -> ir.Pointwise | ir.Reduction:
    """The node with the layout of all its readers, if they agree and it has no gaps."""
    if into is None or len(into) != 1:
        return n
    (layout,), own = into, n.out.type
    if layout == own.layout or layout.shape != own.shape or layout.storage is not layout.numel:
        return n
    return replace(n, out=replace(n.out, type=replace(own, layout=layout)))


def _like_its_values(n: ir.Scatter, made: Mapping[str, Layout]) -> ir.Scatter:
    """A table with the dimension order of the values that are written to it.

    Values with channels last then go to contiguous channels, as vectors rather than one by one.
    """
    here = tuple(a.var for a in n.axes)
    for e in loads_of(n.value):
        layout, own = made[e.attrs[0]], n.out.type
        if e.attrs[1] != here or e.args or len(here) != own.rank:
            continue
        if layout.is_contiguous or layout.storage is not layout.numel:
            continue
        return replace(n, out=replace(n.out, type=replace(own, layout=layout.packed(own.shape))))
    return n


def _read_in_place(n: ir.Pointwise) -> frozenset[str]:
    """Buffers that the node reads at the same index as the element it computes."""
    here = tuple(a.var for a in n.axes)
    loads = loads_of(n.body)
    moved = {e.attrs[0] for e in loads if e.args or e.attrs[1] != here}
    return frozenset(e.attrs[0] for e in loads) - moved
