"""Nodes that nobody reads are dropped, unless they are calls with effects.

What has no elements reads nothing: its strides may be 0, and no loop form is made for those.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lenz.context import Context
from lenz.ir.expr import const
from lenz.ir.graph import (
    Extern,
    Graph,
    Node,
    Pointwise,
    Reduction,
    Scan,
    atom_refs,
    outs_of,
    reads_of,
)
from lenz.ir.tensor import Buffer
from lenz.sym import ZERO, Sym, Var


def drop(g: Graph, cx: Context) -> Graph:
    """Keep what outputs, mutations, effects and sizes need, walking from the end."""
    live = {r for a in g.outputs for r in atom_refs(a)}
    for m in g.mutations:
        live |= {m.input, m.value}
    nodes: list[Node] = []
    given = {v for b in g.inputs for s in _sizes(b) for v in s.free_vars}
    for n in reversed(g.nodes):
        if isinstance(n, (Pointwise, Reduction, Scan)) and ZERO in n.out.type.shape:
            n = Pointwise(n.out, n.axes, const(0, n.out.dtype))
        if _has_effect(n, given) or any(b.name in live for b in outs_of(n)):
            nodes.append(n)
            live.update(reads_of(n))
    return replace(g, nodes=tuple(reversed(nodes)))


def _has_effect(n: Node, given: Collection[Var]) -> bool:
    # A call that writes, draws random numbers, yields a size, or returns no tensor must happen.
    if not isinstance(n, Extern):
        return False
    outs = len(outs_of(n))
    if n.mutates or n.draws or outs == 0 or outs < sum(o is not None for o in n.outs):
        return True
    # Sizes that are found out as the call runs: an assertion may read them, if nobody else does.
    return any(v not in given for b in outs_of(n) for s in _sizes(b) for v in s.free_vars)


def _sizes(b: Buffer | Sym) -> tuple[Sym, ...]:
    return (b,) if isinstance(b, Sym) else (*b.type.shape, *b.type.layout.stride)
