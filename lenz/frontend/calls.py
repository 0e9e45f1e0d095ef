"""Calls of a traced graph: what they read and write, and how to insert one.

Works for Dynamo's graphs, which call functions and methods, and for AOTAutograd's.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import combinations
from types import FunctionType
from typing import Any

import torch
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree

from lenz.frontend.values import storage_of

CALLS = ("call_function", "call_method")
# Calls that read only the shape and type of their first argument.
SHAPE_ONLY = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "size")
ASSIGNED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
WRITES = (operator.setitem, *(getattr(operator, f"i{x}") for x in ASSIGNED))
KEPT = ("stack_trace", "nn_module_stack", "custom")  # keys of `meta`: where a call comes from


def fake_of(a: Any) -> torch.Tensor | None:
    """Return the fake tensor of an argument; None if it is not a tensor."""
    value = a.meta.get("example_value") if isinstance(a, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def called(
    gm: GraphModule, before: Node, target: Any, *args: Any, like: Node | None = None, **kwargs: Any
) -> Node:
    """Insert a call of a function, or of a method by name, with the origin of `like`.

    `like` defaults to `before`.
    """
    with gm.graph.inserting_before(before):
        kind = "call_method" if isinstance(target, str) else "call_function"
        made = gm.graph.create_node(kind, target, args, kwargs)
    made.meta = {k: v for k, v in (like or before).meta.items() if k in KEPT}
    return made


def inserter(graph: Graph, n: Node) -> Callable[..., Node]:
    """Return a function that inserts calls at `n`, with the origin of `n` and their own values."""

    def call(op: Any, *args: Any, **kwargs: Any) -> Node:
        name = getattr(op, "overloadpacket", op).__name__.strip("_")
        made = graph.create_node("call_function", op, args, kwargs, name)
        own = ("tensor_meta", "unbacked_bindings", "desc", "val")
        made.meta = {k: v for k, v in n.meta.items() if k not in own}
        made.meta["val"] = op(*map_arg(args, lambda a: a.meta["val"]), **kwargs)
        return made

    return call


def traced(n: Node) -> Any:
    """Return the traced value of a node: fake tensors, sizes."""
    return n.meta["val"] if "val" in n.meta else n.meta.get("example_value")


def callee(n: Node) -> str:
    name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
    return name.partition(".")[0]


def operands(n: Node) -> list[Node]:
    """Return the tensors whose values `n` reads."""
    found = n.all_input_nodes[1 if callee(n) in SHAPE_ONLY else 0 :]
    return [a for a in found if not isinstance(traced(a), torch.SymInt)]


def storages(*nodes: Node) -> Iterator[int]:
    """Return the storage of each tensor that the nodes return."""
    leaves = _pytree.tree_leaves([traced(n) for n in nodes])
    return (s for x in leaves if (s := storage_of(x)) is not None)


def is_torch(target: Any) -> bool:
    """Say whether a function is torch's own or an operator, whose name shows its effects."""
    if target is getattr:  # x.mT; no attribute of a tensor tells its strides
        return True
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "prims")
    name = getattr(target, "__name__", "")
    homes = (operator, torch, torch.nn.functional, torch._C._nn)
    return any(getattr(m, name, None) is target for m in homes)


def writes(n: Node) -> bool:
    """Say whether `n` may write into one of its arguments."""
    if n.op not in CALLS:
        return n.op == "call_module"
    if (body := checkpointed(n)) is not None:
        return any(writes(m) for m in body.graph.nodes)
    if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
        return bool(n.target._schema.is_mutable)
    if n.op == "call_method" or (n.op == "call_function" and is_torch(n.target)):
        if getattr(operator, callee(n), None) is n.target:  # operator.and_ writes nothing
            return n.target in WRITES
        return callee(n).endswith("_") or "out" in n.kwargs or in_place(n)
    return True


def checkpointed(n: Node) -> GraphModule | None:
    """Return the body of a call of activation checkpointing, None for other nodes."""
    gm = n.graph.owning_module
    if n.target is not tag_activation_checkpoint or gm is None or not isinstance(n.args[0], Node):
        return None
    found = gm.get_submodule(str(n.args[0].target))
    return found if isinstance(found, GraphModule) else None


def copied(gm: GraphModule) -> GraphModule:
    """Return a module whose graph and checkpointed bodies are copies and may be rewritten.

    All else is shared: parameters, other bodies, fake tensors and Dynamo's notes on nodes.
    """
    new = GraphModule(gm, copy.deepcopy(gm.graph), type(gm).__name__)
    state = vars(new)
    state.update({k: v for k, v in vars(gm).items() if k not in state})
    for kind in ("_parameters", "_buffers", "_modules", "meta"):
        state[kind] = dict(vars(gm)[kind])
    for n, m in zip(gm.graph.nodes, new.graph.nodes, strict=True):
        vars(m).update({k: v for k, v in vars(n).items() if k not in vars(m)})  # `_dynamo_source`
        if (body := checkpointed(n)) is not None:
            state["_modules"][str(n.args[0].target)] = copied(body)
    return new


def unwritable(gm: GraphModule, inputs: Sequence[Any]) -> str:
    """Return why a graph that writes must run in eager; empty if it need not.

    For windows of `unfold`, AOTAutograd sets the elements beside them to 0, or adds windows up:
    docs/upstream/torch_written_windows.py. It does not trace writes to tensors of InferenceMode as
    eager does them. For arguments that overlap it keeps their distance without a guard, or takes
    them as apart: docs/upstream/torch_overlapping_arguments.py, torch_overlapping_views.py.
    """
    writers = [n for n in gm.graph.nodes if writes(n)]
    named = [n for n in gm.graph.nodes if callee(n) == "unfold"]  # the function of nn copies
    windows = {*storages(*(n for n in named if not inspect.isfunction(n.target)))}
    if windows and any(_may_change(n, windows) for n in writers):
        return "it writes to windows of `unfold`, or to what they are of"
    places, shared = gm.graph.find_nodes(op="placeholder"), dict[int, list[int]]()
    for i, x in enumerate(inputs):
        if (s := storage_of(x)) is not None:
            shared.setdefault(s, []).append(i)
    for at in shared.values():
        group, found = [inputs[i] for i in at], ""
        if group[0].is_inference() and not torch.is_inference_mode_enabled():
            found = "it writes, and an argument is a tensor of InferenceMode"
        tables = [x for x in group if x.dim() == 2]
        pairs = combinations(() if all(x.is_contiguous() for x in tables) else tables, 2)
        overlap = len(group) > 1 and compute_overlapping_tensors(group, symbolic=False)
        if overlap or any(map(_overlooked, pairs)):
            found = "it writes, and two arguments overlap"
        own = set(storages(*(places[i] for i in at)))
        if found and any(_may_change(n, own) for n in writers):
            return found
    return ""


def _may_change(n: Node, own: Set[int]) -> bool:
    """Say whether `n`, which writes, may write to one of these storages."""
    is_first = n.target in WRITES or (n.op == "call_method" and n.target != "set_")
    found = n.all_input_nodes[:1] if is_first else n.all_input_nodes
    return any(traced(a) is None or not own.isdisjoint(storages(a)) for a in found)


def _overlooked(pair: Sequence[torch.Tensor]) -> bool:
    """Rows at one distance, the first column of one among the columns of the other, further down.

    torch sees it if both are contiguous or if columns are wrapped around.
    """
    facts = [(t.storage_offset(), *t.stride(), *t.shape) for t in pair]
    x, y = sorted([s if isinstance(s, int) else s.node.hint or 0 for s in f] for f in facts)
    (at, step, one, n, m), (to, *steps, rows, columns) = x, y
    row, column = divmod(to - at, max(step, 1))
    is_seen = column + columns > step or (m == step and (columns == step or rows == 1))
    return steps == [step, 1] == [step, one] and 0 < row < n and column < m and not is_seen


def in_place(n: Node) -> bool:
    """Say whether a function of torch.nn.functional is called in place."""
    if not isinstance(n.target, FunctionType):
        return False
    given = inspect.signature(n.target).bind(*n.args, **n.kwargs).arguments
    return bool(given.get("inplace") or given.get("kwargs", {}).get("inplace"))
