"""One call draws the keys of all random nodes on a device.

    %s = call lenz.seed();  %t = call lenz.seed();  map { random_bits(load(%t, [0]), ...) }
    ==>  %s = call lenz.seed(2);  map { random_bits(load(%s, [2]), ...) }

A draw is a kernel of torch on a GPU, and a call on any device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lenz.context import Context
from lenz.ir.expr import Expr, load, replace_loads
from lenz.ir.graph import LOOPS, Extern, Graph, Node, map_bodies, outs_of
from lenz.ir.tensor import contiguous
from lenz.opt.each import each
from lenz.sym import sym

WORDS = 2  # of a key: the seed, and the first counter


def keys(g: Graph, cx: Context) -> Graph:
    """Let the first draw on each device give the keys of the others."""
    first: dict[str, str] = {}
    place: dict[str, tuple[str, int]] = {}
    count = Counter[str]()
    for n in g.nodes:
        if isinstance(n, Extern) and n.draws == "key":
            (out,) = outs_of(n)
            name = first.setdefault(out.type.device, out.name)
            place[out.name] = name, WORDS * count[name]
            count[name] += 1

    def moved(e: Expr) -> Expr | None:
        name, index, dtype = e.attrs
        if name not in place:
            return None
        name, start = place[name]
        return load(name, (index[0] + start,), dtype, e.args)

    def once(n: Node) -> Node | Sequence[Node]:
        if isinstance(n, LOOPS):
            return map_bodies(n, lambda e: replace_loads(e, moved))
        if not isinstance(n, Extern) or n.draws != "key":
            return n
        (out,) = outs_of(n)
        if not (many := count[out.name]):
            return ()
        made = replace(out, type=replace(out.type, layout=contiguous((sym(WORDS * many),))))
        return replace(n, outs=(made,), args=(many, *n.args))

    return each(g, once) if count.total() > len(count) else g
