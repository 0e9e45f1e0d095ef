"""Equal loop nodes are computed once.

    %a = map (i) { exp(load(%x, [i])) };  %b = map (i) { exp(load(%x, [i])) };  use(%b)
    ==>  %a = ...;  use(%a)

A graph output keeps its own buffer: two outputs of one graph never share memory unless eager's do.
"""

from __future__ import annotations

from dataclasses import replace

from lenz.context import Context
from lenz.ir.expr import Expr, load, replace_loads
from lenz.ir.graph import Atom, Extern, Graph, Node, Pointwise, Reduction, Ref, View, atom_refs


def dedup(g: Graph, cx: Context) -> Graph:
    """Merge loop nodes with equal type, axes and body; as expressions are interned, by hash."""
    kept = {r for a in g.outputs for r in atom_refs(a)} | {m.value for m in g.mutations}
    for n in g.nodes:
        if isinstance(n, Extern):
            kept |= {*n.mutates, *(name for _, name in n.aliases)}
        elif isinstance(n, View):
            kept.add(n.source)
    first: dict[object, str] = {}
    same: dict[str, str] = {}
    nodes: list[Node] = []
    for n in g.nodes:
        n = rename_reads(n, same) if same else n
        if isinstance(n, (Pointwise, Reduction)):
            rest = (n.raxes, n.kind, n.finish) if isinstance(n, Reduction) else ()
            key = (n.axes, n.body, n.out.type, rest)
            other = first.setdefault(key, n.out.name)
            if other != n.out.name and n.out.name not in kept:
                same[n.out.name] = other
                continue
        nodes.append(n)
    return replace(g, nodes=tuple(nodes))


def rename_reads(n: Node, same: dict[str, str]) -> Node:
    """The node with buffers that it reads renamed."""
    match n:
        case Pointwise(_, _, body) | Reduction(_, _, _, _, body):
            return replace(n, body=replace_loads(body, lambda e: _renamed(e, same)))
        case View(_, source):
            return replace(n, source=same.get(source, source))
        case Extern(_, _, args, kwargs):
            return replace(
                n,
                args=tuple(_atom(a, same) for a in args),
                kwargs=tuple((k, _atom(a, same)) for k, a in kwargs),
            )


def _renamed(e: Expr, same: dict[str, str]) -> Expr | None:
    name, index, dtype = e.attrs
    return load(same[name], index, dtype, e.args) if name in same else None


def _atom(a: Atom, same: dict[str, str]) -> Atom:
    if isinstance(a, Ref):
        return Ref(same.get(a.name, a.name))
    return tuple(_atom(x, same) for x in a) if isinstance(a, tuple) else a
