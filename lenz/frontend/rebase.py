"""Results that AOTAutograd rebuilds from a written argument: views of it, not of the new value.

    v = add(x, 1); copy_(x, v); return slice(v), copy_
        ==>   v = add(x, 1); copy_(x, v); return slice(x), x

For `x.add_(1); return x[1:]` AOTAutograd hands out `slice(v)`, and at run time takes no more of it
than shape, strides and offset, to view the caller's `x` so.  With the view taken of `x` itself, `v`
need not exist; `lower` reads the argument where `of_argument` stands in a node's `meta`, and where
the argument itself is a result.
"""

from __future__ import annotations

import torch
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from lenz.frontend.normalise import VIEWS
from lenz.frontend.values import is_same_layout, unguarded

aten = torch.ops.aten
REBUILT = (OutputType.is_input, OutputType.alias_of_input)
MOVABLE = (
    *VIEWS, aten.select.int, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
    aten.diagonal.default, aten.alias.default, aten.detach.default,
)  # fmt: skip


def rebase(graph: Graph, metadata: ViewAndMutationMeta | None) -> None:
    """Move the results of `graph` that are rebuilt from an argument over to that argument.

    Only for graphs without a backward pass, whose results autograd does not look at.
    """
    output = graph.output_node()
    results = output.args[0]
    descriptions = output.meta.get("desc")
    if metadata is None or descriptions is None or not isinstance(results, (tuple, list)):
        return
    sources = written_from(graph)
    if not sources or len(descriptions) != len(results):
        return
    moved = list(results)
    with graph.inserting_before(output):
        for i, (result, description) in enumerate(zip(results, descriptions, strict=True)):
            place = getattr(description, "idx", None)
            if type(description).__name__ != "PlainAOTOutput" or place is None:
                continue
            if metadata.output_info[place].output_type in REBUILT and isinstance(result, Node):
                chain = views_down_to(result, sources)
                if chain is not None:
                    moved[i] = replay(graph, chain, sources)
    output.args = (tuple(moved),)


def written_from(graph: Graph) -> dict[Node, Node]:
    """Map each value that is copied into an argument of the same layout to that argument."""
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.copy_.default:
            place, value = node.args[0], node.args[1]
            if not isinstance(value, Node) or place.op != "placeholder":
                continue
            if not isinstance(place.meta.get("val"), FakeTensor):
                continue
            found[node] = place  # it gives the argument
            if is_same_layout(place.meta["val"], value.meta.get("val"), offset=False):
                found.setdefault(value, place)
    return found


def views_down_to(result: Node, sources: dict[Node, Node]) -> tuple[Node, ...] | None:
    """Return the views from a value of `sources` to `result`, that value first; None if none."""
    chain = [result]
    while chain[-1] not in sources:
        node = chain[-1]
        if node.op != "call_function" or node.target not in MOVABLE:
            return None
        if not isinstance(node.args[0], Node):
            return None
        chain.append(node.args[0])
    return tuple(reversed(chain))


def replay(graph: Graph, chain: tuple[Node, ...], sources: dict[Node, Node]) -> Node:
    """Take the views of `chain` again, of the argument instead of the value."""
    value = chain[0]
    at = sources[value]
    # The argument may start anywhere in its storage, the new value starts at 0.
    start = at.meta["val"].storage_offset() - value.meta["val"].storage_offset()
    for view in chain[1:]:
        again = graph.node_copy(view)
        again.args = (at, *view.args[1:])
        again.meta = {**view.meta, "of_argument": True}
        again.meta["val"] = viewed(at.meta["val"], view.meta["val"], start)
        at = again
    return at


def viewed(source: FakeTensor, like: FakeTensor, start: int | torch.SymInt) -> torch.Tensor:
    """Return a fake view of `source`, with the layout of `like` moved by `start`: no guard."""
    with unguarded(source.fake_mode):
        return source.as_strided(like.size(), like.stride(), like.storage_offset() + start)
