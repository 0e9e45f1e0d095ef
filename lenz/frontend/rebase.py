"""Results that AOTAutograd rebuilds from a written argument: views of it, not of the new value.

    v = add(x, 1); copy_(x, v); return slice(v), copy_
        ==>   v = add(x, 1); copy_(x, v); return slice(x), x

For `x.add_(1); return x[1:]` AOTAutograd returns `slice(v)`, and at run time uses only its shape,
strides and offset, to make that view of the caller's `x`. That is wrong if `v` has other strides
than `x`. A view of `x` itself is right, and `v` need not exist. `lower` reads the argument if
`of_argument` is in a node's `meta`, and if the argument itself is a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._functorch._aot_autograd.schemas import OutputAliasInfo, OutputType, ViewAndMutationMeta
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from lenz.frontend.program import Output
from lenz.frontend.values import are_same, unguarded
from lenz.traits import has

aten = torch.ops.aten
REBUILT = (OutputType.is_input, OutputType.alias_of_input)


def rebase(graph: Graph, metadata: ViewAndMutationMeta | None) -> None:
    """Make the results of `graph` that are rebuilt from an argument views of that argument.

    Only for graphs without a backward pass, whose results autograd does not see.
    """
    if not (sources := written_from(graph)):
        return
    output, moved = graph.output_node(), list(returned_of(graph))
    with graph.inserting_before(output):
        for i, told in told_of(graph, metadata).items():
            if told.output_type in REBUILT and isinstance(moved[i], Node):
                chain = views_down_to(moved[i], sources)
                if chain is not None:
                    moved[i] = replay(graph, chain, sources[chain[0]])
    output.args = (tuple(moved),)


def told_of(graph: Graph, metadata: ViewAndMutationMeta | None) -> dict[int, OutputAliasInfo]:
    """Return what AOTAutograd says of the user's results, by position."""
    told: Any = graph.output_node().meta.get("desc") if metadata is not None else None
    # Effect tokens come first; where they are made inside the graph, it only has their notes.
    told = told[len(told) - len(returned_of(graph)) :] if told else ()
    places = {i: d.idx for i, d in enumerate(told) if type(d).__name__ == "PlainAOTOutput"}
    return {i: cast(Any, metadata).output_info[k] for i, k in places.items()}


def is_apart(told: OutputAliasInfo, result: Output) -> bool:
    """Return whether a result with a gradient is no view for autograd.

    As in eager, parts of an argument (`x.chunk(2)`) are views, which autograd keeps from writes,
    but those of `x.unsafe_chunk(2)` are not.
    """
    if not told.requires_grad or told.output_type is not OutputType.non_alias:
        return False
    node: Any = result.node if result.alias_input is not None else None
    while node is not None and node.op == "call_function" and not has(node.target, "views"):
        node = node.args[0]
    return node is None or node.op == "call_function"


def returned_of(graph: Graph) -> Sequence[Any]:
    """Return the results of a graph, in order."""
    returned = graph.output_node().args[0]
    return returned if isinstance(returned, (tuple, list)) else (returned,)


def written_from(graph: Graph) -> dict[Node, Node]:
    """Map each value that is copied into one argument of the same shape to that argument."""
    found: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        place, value = cast(tuple[Node, Node], node.args[:2])
        if place.op != "placeholder" or not isinstance(place.meta.get("val"), FakeTensor):
            continue
        found[node] = place  # it returns the argument
        x, v = place.meta["val"], value.meta.get("val")
        if isinstance(v, FakeTensor) and x.dtype == v.dtype and are_same(x.shape, v.shape):
            # If it is written into two arguments, the result may be a view of either.
            found[value] = place if value not in found else node
    return {value: place for value, place in found.items() if place.op == "placeholder"}


def views_down_to(result: Node, sources: dict[Node, Node]) -> tuple[Node, ...] | None:
    """Return the views from a value of `sources`, included, to `result`; None without one."""
    chain = [result]
    while chain[-1] not in sources:
        n, source = chain[-1], next(iter(chain[-1].args), None)
        is_view = n.target is aten.as_strided.default or has(n.target, "view")
        if not (is_view or has(n.target, "alias")) or not isinstance(source, Node):
            return None
        chain.append(source)
    return tuple(reversed(chain))


def replay(graph: Graph, chain: tuple[Node, ...], argument: Node) -> Node:
    """Repeat the views of `chain` on the argument instead of the value.

    They need no guards: Dynamo traced them on the argument as well.
    """
    at = argument
    for view in chain[1:]:
        again = graph.node_copy(view)
        again.args = (at, *view.args[1:])
        args, kwargs = cast(Any, map_arg((again.args, view.kwargs), lambda n: n.meta["val"]))
        with unguarded(args[0].fake_mode):
            val = view.target(*args, **kwargs)  # type: ignore[operator]  # a view
            again.meta = {**view.meta, "of_argument": True, "val": val}
        at = again
    return at
