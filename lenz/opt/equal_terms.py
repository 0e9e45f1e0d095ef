"""Simplify reductions of elements that are equal along an axis.

    %s = reduce sum (i: N | r: 3, q: 64) { f(i, r) }
    ==>  %s = reduce sum (i: N | r: 3) { f(i, r) } finish { mul(acc, 64.0:f32) }

A product is rounded once. If a thread adds n equal floats one by one, the sum may drift by n / 4
units in the last place, in the same way for each row. Under a mean over pixels, the gradient of a
batch norm's weights was off by 6e-7 on a GPU, and values that cancel after it by 1e-5. The maximum
or minimum of equal elements is any of them.
"""

from __future__ import annotations

from dataclasses import replace

from lenz import ops
from lenz.context import Context
from lenz.ir.expr import finished, ref, vars_of
from lenz.ir.graph import Graph, Node, Pointwise, Reduction, buffers_of
from lenz.machines import runs_programs
from lenz.opt.each import each
from lenz.opt.unloop import written_out
from lenz.sym import ZERO, Int, product


def equal_terms(g: Graph, cx: Context) -> Graph:
    """Remove the axes along which nothing varies; needs complete bodies."""
    layouts = {name: b.type.layout for name, b in buffers_of(g).items()}

    def shorter(n: Node) -> Node:
        new = _fewer(n) if isinstance(n, Reduction) else None
        if new is None or not cx.allow("equal_terms", new.out.name):
            return n
        body = written_out(new, layouts) if runs_programs(new.out.type.device) else None
        body = body if new.raxes else ops.of_one(new.kind, new.body)
        if body is None:
            return new
        return Pointwise(new.out, new.axes, finished(new.finish, body))

    return each(g, shorter)


def _fewer(n: Reduction) -> Reduction | None:
    """The reduction without such axes; None if there are none."""
    varies = vars_of(n.body)
    told = [a for a in n.raxes if isinstance(a.extent, Int) and a.extent is not ZERO]
    same = [a for a in told if a.var not in varies]
    count = product(a.extent for a in same).hi or 0
    dtype = n.body.dtype
    known = n.kind in ("max", "min") or (n.kind == "sum" and (dtype.is_float or dtype.bits >= 32))
    if count == 1 or count >= 2**31 or not known:
        return None
    finish = finished(n.finish, ref("acc", dtype) * count) if n.kind == "sum" else n.finish
    return replace(n, raxes=tuple(a for a in n.raxes if a not in same), finish=finish)
