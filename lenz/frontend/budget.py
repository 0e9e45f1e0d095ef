"""What is saved where memory has a budget: the cheapest results are computed again instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._functorch.partitioners import MinCutOptions, NodeInfo, solve_min_cut
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from lenz.frontend.again import moves_nothing
from lenz.frontend.symbols import hints_of
from lenz.machines import capabilities_of
from lenz.traits import is_random

USUAL = MinCutOptions(True, True, True, True, True)
# Loops are computed again wherever that saves memory, in front of products and far away too.
ALL_LOOPS = MinCutOptions(False, False, False, True, True)


def choose_saved(graph: Graph, info: NodeInfo, memory_budget: float = 1) -> list[Node]:
    """Return what the forward half saves: at most `memory_budget`, or the least that is possible.

    A budget up to 1 is a part of the bytes that are saved without one; others are bytes.  Results
    may be computed again in the order of their cost per byte, as few as are needed: a smaller
    budget never saves more.
    """
    saved, _ = solve_min_cut(graph, info, USUAL)
    limit = memory_budget * kept_bytes(saved) if memory_budget <= 1 else memory_budget
    if kept_bytes(saved) <= limit:
        return saved
    _, banned = solve_min_cut(graph, info, ALL_LOOPS)
    order = [n for n in graph.nodes if n in banned and may_repeat(n)]
    order.sort(key=lambda n: cost(n) / max(bytes_of(n), 1))
    best, _ = solve_min_cut(graph, info, ALL_LOOPS, OrderedSet(order))
    low, high = 0, len(order)  # `best` repeats the first `high` of them
    while low < high:
        middle = (low + high) // 2
        saved, _ = solve_min_cut(graph, info, ALL_LOOPS, OrderedSet(order[:middle]))
        if kept_bytes(saved) <= limit:
            best, high = saved, middle
        else:
            low = middle + 1
    return best


def kept_bytes(saved: Iterable[Node]) -> int:
    """Return the bytes of saved results, each memory once; arguments are alive anyway."""
    found: dict[Node, int] = {}
    for n in saved:
        base = n
        while moves_nothing(base) and base.all_input_nodes:
            base = base.all_input_nodes[0]
        if base.op != "placeholder":
            found[base] = bytes_of(base)
    return sum(found.values())


def may_repeat(n: Node) -> bool:
    """Say whether a second call of an op gives the same, and nobody notices it."""
    op, value = n.target, n.meta.get("val")
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    if op._schema.is_mutable or is_random(op):
        return False
    if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return False
    results = value if isinstance(value, (tuple, list)) else [value]
    return all(isinstance(t, torch.Tensor) and not free_unbacked_symbols(t) for t in results)


def cost(n: Node) -> float:
    """Return what a call costs, in bytes that are moved in the same time."""
    moved = bytes_of(n) + sum(map(bytes_of, n.all_input_nodes))
    count = flop_registry.get(n.target.overloadpacket)  # type: ignore[union-attr]  # see may_repeat
    if count is None:
        return moved
    args, out = tree_map(shape_of, (n.args, n.meta["val"]))
    (device, *_) = (t.device.type for t in tree_leaves(n.meta["val"]))
    return moved + float(count(*args, out_val=out)) / capabilities_of(device).balance


def shape_of(x: Any) -> Any:
    """Return the sizes of a tensor, by the example; other arguments as they are."""
    value = x.meta["val"] if isinstance(x, Node) else x
    return [example_size(s) for s in value.shape] if isinstance(value, torch.Tensor) else value


def bytes_of(n: Node) -> int:
    """Return the bytes of a result, by the sizes of the example."""
    found = tree_leaves(n.meta.get("val"))
    return sum(example_size(t.numel()) * t.itemsize for t in found if isinstance(t, torch.Tensor))


def example_size(s: Any) -> int:
    """Return a size of the example; 4096 where data decides it."""
    if isinstance(s, int):
        return s
    value = s.node.expr.xreplace(hints_of(s.node.shape_env))
    return int(value) if value.is_Integer else 4096
