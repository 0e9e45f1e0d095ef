"""Half-precision values that stay inside a kernel keep their f32 precision.

    cast(narrow(x, bf16), f32)   ==>   x          (x: f32)

`narrow` is the rounding that an op does when it returns a half tensor; a `cast` that the user wrote
is always done. With `emulate_rounding` the pass does nothing, and results match eager bit by bit.
"""

from __future__ import annotations

from dataclasses import replace

from lenz import ops
from lenz.context import Context
from lenz.ir.dtype import F32
from lenz.ir.expr import Expr, interpret, rebuild
from lenz.ir.graph import Graph, Node, Pointwise, Reduction


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


def widen(body: Expr) -> Expr:
    """The rule above, everywhere in one expression."""

    def visit(e: Expr, args: list[Expr]) -> Expr:
        if e.op is ops.CAST and e.dtype is F32 and args[0].op is ops.NARROW:
            return args[0].args[0]
        return rebuild(e, tuple(args))

    return interpret(body, visit)
