"""Gives the backward half the actual strides of the forward half's saved tensors.

AOTAutograd traces both halves with eager's strides, and calls the backward compiler with fake
arguments that have the strides reported by the forward compiler. Values computed from them get
their strides here, so that the graph shows the actual strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree

from lenz.frontend.calls import storages
from lenz.frontend.strides import VIEW, dense, eager_strides, rule_of
from lenz.frontend.values import are_same, is_same_layout, unguarded
from lenz.traits import has, trait

aten = torch.ops.aten
SPACE = "_c10d_functional"
LATE = tuple(f"{SPACE}.{x}.default" for x in ("wait_tensor", "broadcast", "all_reduce_coalesced"))


def restride(gm: GraphModule, inputs: Sequence[Any], told: Iterable[Node] = ()) -> None:
    """Give the placeholders the strides of `inputs`, and all results eager's strides.

    `told` are nodes whose values have changed since their readers were traced. A `view` that is no
    longer possible becomes a `reshape`, which copies.
    """
    changed = set(told)
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, given in zip(places, inputs, strict=bool(inputs)):
        value = node.meta.get("val")
        are_tensors = isinstance(value, FakeTensor) and isinstance(given, FakeTensor)
        if are_tensors and not is_same_layout(value, given, offset=False):
            node.meta["val"] = given
            changed.add(node)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        old = new = node.meta.get("val")
        if not changed.isdisjoint(node.all_input_nodes):
            new = value_of_call(gm, node)
        new = collective_value(node, new) if str(node.target) in LATE else corrected(node, new)
        for k, dtype in mistold_by(node, new).items():
            new = (*new[:k], new[k].to(dtype), *new[k + 1 :]) if k else new.to(dtype)
        if new is not old:
            node.meta["val"] = new
            # Unchanged strides change nothing downstream, but a view is of other memory.
            if not have_same_layouts(old, new) or is_aliased(node):
                changed.add(node)


def mistold(op: object, args: Sequence[Any], told: Any) -> Mapping[int, torch.dtype]:
    """Return eager's types of the results for which `told` has a wrong type."""
    how = trait(op, "type")
    if how == "log_sum":
        is_told = told[0].dtype is not torch.float64 or told[1].dtype is torch.float64
        return {} if is_told else {1: torch.float64}
    values = [told] if isinstance(told, torch.Tensor) else told
    if how is None or (how == "statistics" and values[0].device.type != "cpu"):
        return {}
    types = [v.dtype for v in args if isinstance(v, torch.Tensor)]
    dtype = types[int(how)] if how.isdigit() else reduce(torch.promote_types, types)
    places = (1, 2) if how == "statistics" else (0,)
    return {k: dtype for k in places if values[k].dtype is not dtype}


def mistold_by(node: Node, told: Any) -> Mapping[int, torch.dtype]:
    """Return `mistold` for a node."""
    if not has(node.target, "type"):
        return {}
    return mistold(node.target, map_arg(node.args, lambda n: n.meta.get("val")), told)


def corrected(node: Node, told: Any) -> Any:
    """Return the value of a call with eager's strides for its first result, if known."""
    if rule_of(node.target) is None:
        return told
    first = told[0] if isinstance(told, (tuple, list)) else told
    args = map_arg(node.args, lambda n: n.meta.get("val"))
    is_told = node.kwargs.get("memory_format") not in (None, torch.preserve_format)
    is_told |= not isinstance(first, FakeTensor)
    is_told |= any("val" not in n.meta for n in node.all_input_nodes)
    strides = None if is_told else eager_strides(node.target, args, first)
    if strides is None:
        return told
    if is_aliased(node):
        with first.fake_mode:
            return first.as_strided(first.shape, strides, first.storage_offset())
    values = told[: 1 + (has(node.target, "twins"))] if first is not told else (told,)
    made = [with_strides(v, strides) for v in values]
    return made[0] if first is told else (*made, *told[len(made) :])


def with_strides(value: FakeTensor, strides: Sequence[Any]) -> torch.Tensor:
    """Return a value of the same shape and type with other strides."""
    with value.fake_mode:
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def collective_value(node: Node, told: Any) -> Any:
    """Return the value of a collective, which is contiguous, or of a wait: its argument.

    Fake tensors keep the arguments' strides, and a pending result cannot be copied.
    """
    given: Any = node.args[0]
    values = told if isinstance(told, (tuple, list)) else (told,)
    if str(node.target) == LATE[0]:
        made = [with_strides(v, given.meta["val"].stride()) for v in values]
    else:
        made = [with_strides(v, dense(v.shape, range(v.dim()))) for v in values]
    same = all(are_same(a.stride(), b.stride()) for a, b in zip(values, made, strict=True))
    return told if same else made[0] if values[0] is told else made


def value_of_call(gm: GraphModule, node: Node) -> Any:
    """Return the value of a call for the fake values of its arguments, without guards."""
    tensors = [a.meta["val"] for a in node.all_input_nodes if "val" in a.meta]
    mode = next(v.fake_mode for v in _pytree.tree_leaves(tensors) if isinstance(v, FakeTensor))

    def known(n: Node) -> Any:
        if "val" in n.meta:
            return n.meta["val"]
        value = attrgetter(str(n.target))(gm)
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    args, kwargs = map_arg((node.args, node.kwargs), known)
    call: Any = node.target
    with unguarded(mode):
        try:
            return call(*args, **kwargs)
        except (RuntimeError, ValueError):
            if rule_of(call) != VIEW:
                raise
            node.target = aten.reshape.default
            return aten.reshape.default(*args)


def have_same_layouts(old: Any, new: Any) -> bool:
    """Say whether all tensors of two results have the same layout."""
    pairs = zip(_pytree.tree_leaves(old), _pytree.tree_leaves(new), strict=True)
    return all(is_same_layout(a, b, offset=False) for a, b in pairs if isinstance(a, FakeTensor))


def is_aliased(node: Node) -> bool:
    """Say whether a result aliases an argument."""
    return not {*storages(*node.all_input_nodes)}.isdisjoint(storages(node))
