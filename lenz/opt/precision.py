"""Half-precision values that stay inside a loop keep their f32 precision.

    cast(narrow(x, bf16), f32)   ==>   x          (x: f32)

With `emulate_rounding` the pass does nothing, and results match eager bit by bit.
"""

from __future__ import annotations

from dataclasses import replace

from lenz.context import Context
from lenz.ir.graph import LOOPS, Graph, map_bodies
from lenz.ops.rounding import widen


def precision(g: Graph, cx: Context) -> Graph:
    """Remove implicit roundings that are undone at once."""
    if cx.options.emulate_rounding:
        return g
    nodes = [map_bodies(n, widen) if isinstance(n, LOOPS) else n for n in g.nodes]
    return replace(g, nodes=tuple(nodes))
