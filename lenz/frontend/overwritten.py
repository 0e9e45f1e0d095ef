"""Arguments that a training step overwrites and whose old values its backward half needs.

    y = f(x); copy_(x, z)   ==>   c = clone(x); y = f(c); copy_(x, z)

torch's partitioner saves x, which costs nothing, and recomputes values from it. But backward finds
the new value there. With a copy it saves the copy, or what is made from it.
"""

from __future__ import annotations

import operator

import torch
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from lenz.errors import Unsupported
from lenz.frontend.values import are_same, unguarded
from lenz.traits import has

aten = torch.ops.aten
COPY = "lenz_before_write"  # marks these copies in the data of a node


def copy_arguments(graph: Graph) -> None:
    """Make all readers of an overwritten argument of a joint graph read a copy.

    Arguments that need no gradient are written in the graph, others by AOTAutograd behind it.
    """
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    outs = graph.output_node().meta.get("desc") or ()
    later = {d.mutated_input for d in outs if isinstance(d, InputMutationAOTOutput)}
    for x in graph.find_nodes(op="placeholder"):
        writes = {u for u in x.users if u.target is aten.copy_.default and u.args[0] is x}
        readers = [u for u in x.users if u not in writes and u.op != "output"]
        if not readers or not (writes or x.meta.get("desc") in later):
            continue
        with graph.inserting_before(first), unguarded(x.meta["val"].fake_mode):
            copy = graph.call_function(aten.clone.default, (x,))
            copy.meta = {"val": x.meta["val"].clone(), COPY: True}
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for u in readers:
            u.replace_input_with(x, copy)
        if is_alike(copy):
            tell_views(copy)


def drop_copies(forward: GraphModule) -> None:
    """Remove the copies that are not saved from the forward half, in place.

    Raises Unsupported if a copy is saved whose argument has gaps, or starts inside of its storage
    where the graph counts from the storage's start: views of the copy would differ.
    """
    saved = {unviewed(n) for n in forward.graph.output_node().all_input_nodes}
    placed = any(has(n.target, "offset") for n in forward.graph.nodes)
    for n in [n for n in forward.graph.nodes if COPY in n.meta]:
        x, is_told = n.args[0], is_alike(n)
        if n not in saved:
            n.replace_all_uses_with(x)
            forward.graph.erase_node(n)
            if is_told:
                tell_views(x)
        elif not is_told or (placed and x.meta["val"].storage_offset()):
            raise Unsupported("backward needs an overwritten argument that is not dense")
    forward.recompile()


def is_alike(copy: Node) -> bool:
    """Say whether a copy has its argument's strides."""
    return are_same(*(n.meta["val"].stride() for n in (*copy.all_input_nodes, copy)))


def tell_views(n: Node) -> None:
    """Make the values of a tensor's views views of its value: they tell who shares memory."""
    stack = [n]
    with unguarded(n.meta["val"].fake_mode):
        while stack:
            for u in stack.pop().users:
                if is_view(u):
                    args, kwargs = map_arg((u.args, u.kwargs), lambda a: a.meta["val"])
                    u.meta["val"] = u.target(*args, **kwargs)  # type: ignore[operator]  # a call
                    stack.append(u)


def unviewed(n: Node) -> Node:
    """Return the value that a node is a view of, or itself."""
    while is_view(n) and n.all_input_nodes:  # torch takes the conjugate of a number as a view
        n = n.all_input_nodes[0]
    return n


def is_view(n: Node) -> bool:
    """Say whether a node gives the memory of its argument, also where no schema tells so."""
    op = n.all_input_nodes[0].target if n.target is operator.getitem else n.target
    return getattr(op, "is_view", False) or has(op, "view") or has(op, "views")
