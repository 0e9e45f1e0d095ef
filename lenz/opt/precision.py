"""Keep f32 precision for half-precision values that stay inside a loop.

    cast(narrow(x, bf16), f32)   ==>   x          (x: f32)

But a value that is compared with another computed value is rounded as in eager, together with all
its operands: x == amax(x) holds somewhere only if x is the same number wherever it is computed.

    eq(cast(narrow(x, bf16), f32), cast(load(%m, [i]), f32))
    ==>  eq(cast(cast(x, bf16), f32), cast(load(%m, [i]), f32))    and so in %m

With `emulate_rounding` the pass does nothing, and results match eager bit by bit.
"""

from __future__ import annotations

from functools import partial

from lenz.context import Context
from lenz.ir.dtype import BOOL
from lenz.ir.expr import Expr, loads_of, nodes_of
from lenz.ir.graph import LOOPS, Graph, Node, View, bodies_of, map_bodies, reads_of
from lenz.ir.op import CONST
from lenz.ops.rounding import widen
from lenz.opt.each import each


def precision(g: Graph, cx: Context) -> Graph:
    """Remove implicit roundings that are undone at once; keep those that decide comparisons."""
    if cx.options.emulate_rounding:
        return g
    decisive: set[str] = set()  # buffers that comparisons depend on

    def exact(n: Node) -> Node:
        if isinstance(n, View) and n.out.name in decisive:
            decisive.add(n.source)
        elif isinstance(n, LOOPS):
            whole = n.out.name in decisive
            kept = bodies_of(n) if whole else _compared(bodies_of(n))
            decisive.update(reads_of(n) if whole else (e.attrs[0] for e in loads_of(*kept)))
            return map_bodies(n, partial(widen, kept=frozenset(nodes_of(*kept))))
        return n

    return each(g, exact, last_first=True)


def _compared(bodies: tuple[Expr, ...]) -> list[Expr]:
    """The operands of comparisons of two floats, neither of them a constant."""
    tests = [e for e in nodes_of(*bodies) if e.dtype is BOOL and len(e.args) == 2]
    tests = [e for e in tests if e.args[0].dtype.is_float and CONST not in {a.op for a in e.args}]
    return [x for e in tests for x in e.args]
