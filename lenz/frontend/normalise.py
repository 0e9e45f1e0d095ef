"""Make an AOTAutograd graph small and regular before lowering.

Passes change the graph in place: nobody else holds it yet. They keep `meta` (fake values, stack
traces), never evaluate a SymInt (which would add a guard), and never merge or drop a tensor that is
returned or that something writes into.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree

from lenz.frontend.calls import inserter, storages
from lenz.frontend.collectives import is_collective
from lenz.frontend.overwritten import COPY, unviewed
from lenz.frontend.values import is_same_layout
from lenz.frontend.written import join_parts
from lenz.records import dataclass
from lenz.traits import arguments, has, is_random

aten = torch.ops.aten

STRIDED = (aten.as_strided.default, aten.as_strided_scatter.default)


@dataclass(frozen=True, slots=True)
class TouchedStorages:
    """The storages of a graph that leave it, are written, or are read by offset."""

    returned: frozenset[int]
    mutated: frozenset[int]
    by_offset: frozenset[int]
    outputs: frozenset[Node]


def normalise(gm: GraphModule) -> None:
    """Run all passes: in-place results, strides, constants, no-ops, equal calls, dead code."""
    forward_writes(gm.graph)
    prune(gm.graph)
    view_strided(gm.graph)
    drop_noops(gm.graph, touched_by(gm.graph))
    merge(gm)
    prune(gm.graph)
    drop_tokens(gm.graph)


def multiply_in_pairs(graph: Graph) -> None:
    """Split products of more than two sizes: torch calls `operator.mul` once for all of them."""
    for node in graph.nodes:
        while node.target is operator.mul and len(node.args) > 2:
            first, second, *rest = node.args
            with graph.inserting_before(node):
                node.args = (inserter(graph, node)(operator.mul, first, second), *rest)


def written_by(node: Node) -> tuple[Node, ...]:
    """Return the argument nodes that `node` writes into, in the order of its schema.

    A higher-order operator whose name says that it mutates counts as writing all its arguments.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if not target._schema.is_mutable:
            return ()
        written = [given for a, given in arguments(node) if a.alias_info and a.alias_info.is_write]
        return tuple(n for n in _pytree.tree_leaves(written) if isinstance(n, Node))
    if isinstance(target, torch._ops.HigherOrderOperator) and "mutation" in str(target):
        return tuple(node.all_input_nodes)
    return ()


def touched_by(graph: Graph) -> TouchedStorages:
    """Collect the facts that decide which rewrites of `graph` are legal.

    Where a pass put another call in the place of one, its views still have the old one's storage:
    what they are views of counts as well.
    """
    outputs = graph.output_node().all_input_nodes
    calls = [n for n in graph.nodes if n.op == "call_function"]
    written = [a for n in calls for a in written_by(n)]
    by_offset = [a for n in calls if has(n.target, "offset") for a in n.all_input_nodes]
    left = [*outputs, *(a for n in calls if has(n.target, "gives") for a in n.all_input_nodes)]
    lists = ((*x, *map(unviewed, x)) for x in (left, written, by_offset))
    returned, mutated, read = (frozenset(storages(*x)) for x in lists)
    return TouchedStorages(returned, mutated, read, frozenset(outputs))


def forward_writes(graph: Graph) -> None:
    """Make readers of `copy_(x, v)` read `x`: an in-place op returns its first argument."""
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        # A reader between the write and the end sees the new value either way.
        node.replace_all_uses_with(node.args[0])


def view_strided(graph: Graph) -> None:
    """Turn `as_strided` over all elements of a contiguous tensor, in order, into a view.

    torch writes pooling to one element in channels last this way. A write through such strides
    replaces the whole tensor:

        as_strided(x, s, dense) -> view(x, s);  as_strided_scatter(x, y, ...) -> view(clone(y), ...)
    """
    for node in graph.nodes:
        if node.target not in STRIDED or any(n.op == "output" for n in node.users):
            continue
        size, stride, *rest = node.args[1 + STRIDED.index(node.target) :]
        offset = rest[0] if rest else node.kwargs.get("storage_offset")
        values = (n.meta["val"] for n in node.args if isinstance(n, Node))
        own = [v for v in values if isinstance(v, torch.Tensor)]  # an offset may be a node as well
        layouts = [n for t in own for n in (*t.shape, *t.stride(), t.storage_offset())]
        if not all(isinstance(n, int) for n in (*size, *stride, *layouts)):
            continue
        x, dense = own[0], torch.empty(size, device="meta").stride()
        is_whole = x.is_contiguous() and x.numel() == math.prod(size)
        is_whole &= all(t.dtype == x.dtype and t.device == x.device for t in own)  # no conversion
        is_dense = all(n == 1 or a == b for n, a, b in zip(size, stride, dense, strict=True))
        if is_whole and is_dense and offset in (None, x.storage_offset()):
            call, source, shape = inserter(graph, node), node.args[0], list(size)
            with graph.inserting_before(node):
                if node.target is STRIDED[1]:
                    form, shape = torch.contiguous_format, list(x.shape)
                    source = call(aten.clone.default, node.args[1], memory_format=form)
                replace(graph, node, call(aten.view.default, source, shape))


def drop_noops(graph: Graph, touched: TouchedStorages) -> None:
    """Drop aliases, views that change nothing, and copies indistinguishable from their source.

    A fresh copy of a constant stays as a `clone` if it leaves the graph or is written, so that
    every call has its own; otherwise its readers read the constant.
    """
    pinned = touched.returned | touched.mutated
    kept = pinned | touched.by_offset
    for node in graph.nodes:
        if node.op != "call_function" or COPY in node.meta:
            continue
        target = node.target
        if target is aten.lift_fresh_copy.default:
            if pinned.isdisjoint(storages(node)):
                replace(graph, node, node.args[0])
            else:
                node.target = aten.clone.default
            continue
        if node in touched.outputs or not node.args or not isinstance(node.args[0], Node):
            continue
        is_written = target is aten.copy.default  # over a whole tensor
        is_view = has(target, "view")
        source: Any = node.args[1 if is_written else 0]
        if has(target, "alias"):
            if target is not aten.detach.default or not is_shown(node, touched):
                replace(graph, node, source)
        elif is_view or is_written or has(target, "copy"):
            own, from_ = tuple(storages(node)), tuple(storages(source))
            is_free = own and from_ and kept.isdisjoint(own) and touched.mutated.isdisjoint(from_)
            values = (n.meta.get("val") for n in (node, source))
            if (is_view or is_free) and is_same_layout(*values, offset=is_view):
                replace(graph, node, source)


def is_shown(node: Node, touched: TouchedStorages) -> bool:
    """Say whether a graph result is a view of `node`: autograd must not see an earlier base."""
    own = tuple(storages(node))
    views = (n for n in node.users if own and own == tuple(storages(n)))
    return any(n in touched.outputs or is_shown(n, touched) for n in views)


def replace(graph: Graph, node: Node, by: Node) -> None:
    """Make all readers of `node` read `by`, and drop `node`."""
    node.replace_all_uses_with(by)
    graph.erase_node(node)


def merge(gm: GraphModule, region: str = "") -> None:
    """Join the parts of tensors that are filled part by part, then merge equal calls."""
    touched = touched_by(gm.graph)
    join_parts(gm.graph, touched.returned | touched.by_offset, touched.mutated)
    dedup(gm, region)


def dedup(gm: GraphModule, region: str) -> None:
    """Merge equal calls of pure ops into the first.

    Calls on both sides of a write are not merged. A call stays if its result leaves the graph (two
    equal results are two tensors in eager), is written into, or is random. Only calls with the same
    `meta[region]` are merged.
    """
    touched = touched_by(gm.graph)
    pinned = touched.returned | touched.mutated
    seen: dict[tuple[object, ...], Node] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            key: tuple[object, ...] = ("get_attr", node.target)
        elif node.op == "call_function":
            if written_by(node) or not is_pure(node):
                if written_by(node) or not isinstance(node.target, torch._ops.OpOverload):
                    seen.clear()
                continue
            # The text of arguments distinguishes 1, 1.0 and True, and 0.0 and -0.0.
            key = node.target, repr(node.args), repr(node.kwargs), node.meta.get(region)
        else:
            continue
        earlier = seen.setdefault(key, node)
        if earlier is node or node in touched.outputs:
            continue
        fresh = {*storages(node)}.difference(storages(*node.all_input_nodes))
        is_plain = pinned.isdisjoint(fresh) and touched.mutated.isdisjoint(storages(earlier))
        if node.op == "get_attr" or is_plain:
            replace(gm.graph, node, earlier)


def drop_tokens(graph: Graph) -> None:
    """Call aten's checks of values without tokens, which only keep them in the graph, in order.

    From here on, nothing drops a call. An artifact can hold the check that an inverse exists.
    """
    tied, token = torch.ops.higher_order.with_effects, torch.ops.prims._make_token.default
    calls = graph.find_nodes(op="call_function", target=tied)
    others = [n for n in calls if n.args[1].namespace != "aten" or n.args[1]._schema.returns]
    if others or not graph.find_nodes(op="call_function", target=token):
        return
    for node in calls:
        with graph.inserting_before(node):
            check = graph.call_function(node.args[1], node.args[2:], node.kwargs)
        check.meta = {**node.meta, "val": None}
    ties = (tied, token, torch.ops.prims._sink_tokens.default, operator.getitem)
    for node in reversed(graph.nodes):
        if node.target in ties and not node.users:
            graph.erase_node(node)


def is_pure(node: Node) -> bool:
    """Say whether equal arguments give equal results, without side effects."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        is_known = target.namespace in ("aten", "prims") and not node.is_impure()
        return is_known and not has(target, "unset") and not is_random(target)
    if target is operator.getitem:
        return True
    # Arithmetic on SymInts: operator.mul, math.ceil, torch.sym_max.
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)) and (
        not isinstance(target, torch._ops.HigherOrderOperator)
    )


def prune(graph: Graph) -> None:
    """Drop unread calls and attributes without side effects.

    Random ops count as having one, so that the generator advances as in eager.
    """
    for node in reversed(graph.nodes):
        is_kept = node.users or node.op in ("placeholder", "output")
        if not (is_kept or node.is_impure() or is_collective(node)):
            graph.erase_node(node)
