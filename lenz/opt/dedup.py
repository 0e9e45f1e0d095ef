"""Equal loop nodes are computed once.

    %a = map (i) { exp(load(%x, [i])) };  %b = map (i) { exp(load(%x, [i])) };  use(%b)
    ==>  %a = ...;  use(%a)

A graph output keeps its own buffer: two outputs of one graph never share memory unless eager's do.
So does memory that a call gives to an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from lenz.context import Context
from lenz.ir.graph import LOOPS, Extern, Graph, Node, View, atom_refs, held_by, rename_reads
from lenz.opt.each import each


def dedup(g: Graph, cx: Context) -> Graph:
    """Merge loop nodes with equal type, axes and body, by hash, since expressions are interned."""
    kept = {*atom_refs(g.outputs)} | {m.value for m in g.mutations}
    for n in g.nodes:
        if isinstance(n, Extern):
            kept |= {*n.mutates, *held_by(n), *(name for _, name in n.aliases)}
        elif isinstance(n, View):
            kept.add(n.source)
    written = {name for n in g.nodes if isinstance(n, Extern) for name in n.mutates}
    first: dict[object, str] = {}
    same: dict[str, str] = {}

    def once(n: Node) -> Node | Sequence[Node]:
        n = rename_reads(n, same) if same else n
        if isinstance(n, LOOPS) and n.out.name not in written:
            parts = [getattr(n, f.name) for f in fields(n) if f.name != "out"]
            other = first.setdefault((type(n), n.out.type, *parts), n.out.name)
            if other != n.out.name and n.out.name not in kept:
                same[n.out.name] = other
                return ()
        return n

    return each(g, once)
