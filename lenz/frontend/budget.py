"""Saving within a memory budget: the cheapest results are recomputed instead."""

from __future__ import annotations

from bisect import bisect_left
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

from lenz.frontend.overwritten import unviewed
from lenz.frontend.symbols import hints_of
from lenz.machines import capabilities_of
from lenz.traits import is_random

USUAL = MinCutOptions(True, True, True, True, True)
# Loops are recomputed wherever that saves memory, also before matrix products and far away.
ALL_LOOPS = MinCutOptions(False, False, False, True, True)


def choose_saved(graph: Graph, info: NodeInfo, memory_budget: float = 1) -> list[Node]:
    """Return the values that the forward half saves: at most `memory_budget`, if possible.

    A budget up to 1 is a fraction of the bytes saved without a budget; others are bytes. Results
    are recomputed in the order of their cost per byte, as few as needed: a smaller budget never
    saves more.
    """
    saved, _ = solve_min_cut(graph, info, USUAL)
    limit = memory_budget * kept_bytes(saved) if memory_budget <= 1 else memory_budget
    if kept_bytes(saved) <= limit:
        return saved
    _, banned = solve_min_cut(graph, info, ALL_LOOPS)
    order = [n for n in graph.nodes if n in banned and may_repeat(n)]
    order.sort(key=lambda n: cost(n) / max(bytes_of(n), 1))

    def without(count: int) -> list[Node]:
        """What is saved if the first of them are recomputed."""
        return solve_min_cut(graph, info, ALL_LOOPS, OrderedSet(order[:count]))[0]

    few = bisect_left(range(len(order)), True, key=lambda k: kept_bytes(without(k)) <= limit)
    return without(few)


def kept_bytes(saved: Iterable[Node]) -> int:
    """Return the bytes of saved results, each storage once; arguments are alive anyway."""
    return sum(bytes_of(base) for base in {*map(unviewed, saved)} if base.op != "placeholder")


def may_repeat(n: Node) -> bool:
    """Say whether an op may be called a second time: same result, no side effect."""
    op, value = n.target, n.meta.get("val")
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    is_saved = n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
    if op._schema.is_mutable or is_random(op) or is_saved:
        return False
    results = value if isinstance(value, (tuple, list)) else [value]
    return all(isinstance(t, torch.Tensor) and not free_unbacked_symbols(t) for t in results)


def cost(n: Node) -> float:
    """Return the cost of a call, as the bytes that could be moved in the same time."""
    moved = bytes_of(n) + sum(map(bytes_of, n.all_input_nodes))
    count = flop_registry.get(n.target.overloadpacket)  # type: ignore[union-attr]  # see may_repeat
    if count is None:
        return moved
    args, out = tree_map(shape_of, (n.args, n.meta["val"]))
    (device, *_) = (t.device.type for t in tree_leaves(n.meta["val"]))
    return moved + float(count(*args, out_val=out)) / capabilities_of(device).balance


def shape_of(x: Any) -> Any:
    """Return the sizes of a tensor in the example call; other arguments unchanged."""
    value = x.meta["val"] if isinstance(x, Node) else x
    return [example_size(s) for s in value.shape] if isinstance(value, torch.Tensor) else value


def bytes_of(n: Node) -> int:
    """Return the bytes of a result in the example call."""
    found = tree_leaves(n.meta.get("val"))
    return sum(example_size(t.numel()) * t.itemsize for t in found if isinstance(t, torch.Tensor))


def example_size(s: Any) -> int:
    """Return a size in the example call; 4096 if it is data-dependent."""
    if isinstance(s, int):
        return s
    value = s.node.expr.xreplace(hints_of(s.node.shape_env))
    return int(value) if value.is_Integer else 4096
