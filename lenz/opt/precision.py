"""Half-precision values that stay inside a loop keep their f32 precision.

    cast(narrow(x, bf16), f32)   ==>   x          (x: f32)

With `emulate_rounding` the pass does nothing, and results match eager bit by bit.
"""

from __future__ import annotations

from dataclasses import replace

from lenz.context import Context
from lenz.ir.graph import Graph, Node, Pointwise, Reduction
from lenz.ops.rounding import widen


def precision(g: Graph, cx: Context) -> Graph:
    """Remove implicit roundings that are undone at once."""
    if cx.options.emulate_rounding:
        return g
    nodes: list[Node] = []
    for n in g.nodes:
        if isinstance(n, Pointwise):
            n = replace(n, body=widen(n.body))
        elif isinstance(n, Reduction):
            n = replace(n, body=widen(n.body), finish=widen(n.finish))
        nodes.append(n)
    return replace(g, nodes=tuple(nodes))
