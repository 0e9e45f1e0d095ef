"""Loads through views become loads of the viewed buffer.

    %v = view %x (i, j) [j, i];  map { load(%v, [i, j]) }   ==>   map { load(%x, [j, i]) }

The view node stays for users that need a tensor (eager calls, outputs, mutations). Without such
users it is dropped, so that its source can be inlined if nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

from lenz.context import Context
from lenz.ir.expr import Expr, load, replace_loads
from lenz.ir.graph import LOOPS, Graph, Node, View, map_bodies, reads_of
from lenz.opt.drop import drop
from lenz.opt.each import each
from lenz.sym import Sym, Var, substitute


def views(g: Graph, cx: Context) -> Graph:
    """Rewrite every load of a view into a load of its root buffer."""
    found: dict[str, View] = {}

    def rooted(n: Node) -> Node:
        if isinstance(n, View):
            found[n.out.name] = n
        elif isinstance(n, LOOPS) and any(name in found for name in reads_of(n)):
            return map_bodies(n, lambda e: replace_loads(e, lambda at: _root(at, found)))
        return n

    return drop(each(g, rooted), cx)


def _root(e: Expr, found: Mapping[str, View]) -> Expr | None:
    name, index, dtype = e.attrs
    # Operands @k of the load keep their meaning: the view's index has none of its own.
    return load(*place_in_root(name, index, found), dtype, e.args) if name in found else None


def place_in_root(
    name: str, index: tuple[Sym, ...], found: Mapping[str, View]
) -> tuple[str, tuple[Sym, ...]]:
    """The root of a buffer, and the position in it of the buffer's element at an index."""
    while (v := found.get(name)) is not None:
        at: dict[Var, Sym] = {a.var: i for a, i in zip(v.axes, index, strict=True)}
        name, index = v.source, tuple(substitute(s, at) for s in v.index)
    return name, index
