"""One call draws the keys of all random nodes of a device.

    %s = call lenz.seed();  %t = call lenz.seed()   ==>   %s, %t = call lenz.seeds(2)

A draw is a kernel of torch on a GPU, and a call on any device. Each key stays a buffer of its own,
so that nodes which differ in nothing else have one kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from lenz.context import Context
from lenz.ir.graph import Extern, Graph, Node, outs_of
from lenz.ir.tensor import Buffer
from lenz.opt.each import each


def draws(g: Graph, cx: Context) -> Graph:
    """Let the first draw on each device give the keys of the others."""
    drawn: dict[str, list[Buffer]] = defaultdict(list)
    for n in g.nodes:
        if isinstance(n, Extern) and n.draws == "key":
            drawn[outs_of(n)[0].type.device] += outs_of(n)

    def once(n: Node) -> Node | Sequence[Node]:
        if not isinstance(n, Extern) or n.draws != "key":
            return n
        outs = drawn[outs_of(n)[0].type.device]
        if len(outs) == 1 or outs[0] is not n.outs[0]:
            return n if len(outs) == 1 else ()
        args = (len(outs), *n.args)
        return replace(n, op="lenz.seeds", outs=tuple(outs), args=args, single=False)

    return each(g, once)
