"""Read the bits of a tensor as another type inside loops, where nothing else sees its memory.

    %b = call aten.view.dtype(%a, i32)           %a: f32, of the same width
    ==>  %b = map (i: N) { bitcast(load(%a, [i]), i32) }

The call shares the memory of %a. So it stays for results, and for what calls read, which would be a
copy. It stays for views of memory with gaps, whose strides the dense map has not, and for types of
another width: loops would move single bytes.
"""

from __future__ import annotations

from lenz import ops
from lenz.context import Context
from lenz.ir import graph as ir
from lenz.ir.dtype import BOOL, MOVED
from lenz.ir.expr import load
from lenz.ir.tensor import Buffer, axes_for, contiguous
from lenz.opt.each import each
from lenz.records import replace


def reinterpret(g: ir.Graph, cx: Context) -> ir.Graph:
    """Make maps of the calls of `view.dtype` whose results only loops read."""
    types = {name: b.type for name, b in ir.buffers_of(g).items()}
    apart = {name for name, t in types.items() if t.layout != contiguous(t.shape)}
    seen = {*ir.atom_refs(g.outputs), *(x for m in g.mutations for x in (m.input, m.value))}

    def mapped(n: ir.Node) -> ir.Node:
        match n:
            case ir.Extern((Buffer() as out,), "aten.view.dtype", (ir.Ref(source), *_)):
                old, new = types[source].dtype, out.dtype
                fits = {old, new} <= {*MOVED} - {BOOL} and old.bits == new.bits
                if fits and out.name not in seen:
                    axes = axes_for(out.shape)
                    dense = replace(out, type=replace(out.type, layout=contiguous(out.shape)))
                    read = load(source, [a.var for a in axes], old)
                    n = ir.Pointwise(dense, axes, ops.bitcast(read, new))
                else:
                    seen.add(source)
            case ir.Extern():
                seen.update((*ir.names_in(n), *n.mutates))
            case ir.Scatter():
                seen.add(n.base)
            case ir.View() if n.out.name in seen or n.source in apart:
                seen.add(n.source)  # a view keeps its strides, and the map is dense
        return n

    return each(g, mapped, last_first=True)
