"""The walk of a pass over the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lenz.debug.blame import blaming
from lenz.ir.graph import LOOPS, Graph, Loop, Node
from lenz.machines import runs_programs


def each(g: Graph, f: Callable[[Node], Node | Sequence[Node]], last_first: bool = False) -> Graph:
    """The graph with each node replaced by f of it: by one node, or by any number of them."""
    parts: list[Sequence[Node]] = []
    for n in reversed(g.nodes) if last_first else g.nodes:
        with blaming(n):
            made = f(n)
        parts.append(made if isinstance(made, tuple | list) else (made,))
    return replace(g, nodes=tuple(n for p in parts[:: -1 if last_first else 1] for n in p))


def each_on_gpus(g: Graph, f: Callable[[Loop], Loop]) -> Graph:
    """The graph with each loop on a GPU replaced by f of it."""

    def changed(n: Node) -> Node:
        return f(n) if isinstance(n, LOOPS) and runs_programs(n.out.type.device) else n

    return each(g, changed)
