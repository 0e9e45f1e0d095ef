"""Partition a joint graph into forward and backward: some values are saved, others recomputed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch import partitioners
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from lenz.errors import Unsupported
from lenz.frontend import again
from lenz.frontend.budget import choose_saved
from lenz.frontend.in_float8 import save_in_float8
from lenz.frontend.normalise import drop_noops, merge, touched_by
from lenz.frontend.overwritten import copy_arguments, drop_copies, unviewed
from lenz.frontend.places import KINKED, SIZED, by_mask, places_below, shorten, without_elements
from lenz.frontend.restride import mistold_by, restride
from lenz.options import Options
from lenz.traits import has, is_random

aten = torch.ops.aten
AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
# What torch's partitioner does not list: ops that are as cheap as a read, which may be computed
# again, and loops that fuse with others.
CHEAP = """leaky_relu hardswish glu _prelu_kernel log_sigmoid_forward binary_cross_entropy
binary_cross_entropy_with_logits mse_loss huber_loss smooth_l1_loss soft_margin_loss flip roll
constant_pad_nd repeat tril index_select embedding"""
LOOPS = f"""{CHEAP} hardswish_backward hardtanh_backward hardshrink_backward softshrink_backward
leaky_relu_backward log_sigmoid_backward mish_backward glu_backward binary_cross_entropy_backward
mse_loss_backward huber_loss_backward smooth_l1_loss_backward soft_margin_loss_backward
linalg_vector_norm amin prod std_mean"""
FREE = (aten._to_copy.default, aten.embedding.default)
FEW = 32  # elementwise ops of a loop that costs no more than it reads
SOFTMAX = (aten._softmax.default, aten._log_softmax.default)


def split(
    joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int,
    native: frozenset[str], options: Options, **rest: Any,
) -> tuple[GraphModule, GraphModule]:  # fmt: skip
    """Return the forward and the backward half of `joint`, by torch's min-cut partitioner.

    Ops that block the partitioner are rewritten first: aliases, transposes, and softmax as one op.
    Equal calls are merged: the cut would otherwise save one and recompute the other. Random ops
    under activation checkpointing (dropout, attention) are saved, not recomputed from a saved
    generator state, which could not fuse. Values compared with a result of their own, as in the
    gradient of a maximum, are saved too. Large index tensors, such as those of maxima, are saved in
    the shortest type that holds them. Norms are recomputed from values that their gradients read
    anyway. Old values of overwritten arguments are copied. `native` names the ops that have a
    lowering and may fuse.
    """
    calls = [n for n in joint.graph.nodes if n.op == "call_function"]
    wrong = {k for n in calls for k in mistold_by(n, n.meta.get("val"))}
    if 0 in wrong:  # its gradients would have the traced type
        raise Unsupported("torch tells another type of a result than it has: operands are of two")
    if wrong:
        restride(joint, ())  # for the types of both halves
    drop_noops(joint.graph, touched_by(joint.graph))
    copy_arguments(joint.graph)
    backward = behind_tangents(joint.graph)
    for n in joint.graph.nodes:
        if n.target is aten.transpose.int:
            as_permute(n)
        elif n.target in SOFTMAX and n not in backward:
            y = again.softmax_in_parts(joint.graph, n)
            if y is not None and is_fused(y, backward, native):
                y.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif is_free_again(n, backward, native):
            n.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif n.target is aten.native_layer_norm.default:
            again.norm_again(joint.graph, n, backward)
        elif n.target in again.NORMS:
            again.norm_in_parts(joint.graph, n, backward)
        elif n.target is aten.native_batch_norm_backward.default and n.args[7]:
            n.args = (*n.args[:3], None, None, *n.args[5:])  # unused running statistics
        elif options.memory_budget is not None and n.target is aten.native_dropout.default:
            again.dropout_in_parts(joint.graph, n)
        elif n.target in SIZED:
            without_elements(joint.graph, n)
        elif n.target in KINKED:
            by_mask(joint.graph, n)
        elif (limit := places_below(n)) is not None:
            shorten(joint.graph, n, limit, backward)
    # What one checkpoint recomputes, another part may have to save.
    merge(joint, "ac_graph_id")
    mark(joint.graph, behind_tangents(joint.graph), native)  # with the joins
    with fusing(options.memory_budget):
        halves = partitioners.min_cut_rematerialization_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest
        )
    drop_copies(halves[0])
    if options.save_as is not None:
        short = getattr(torch, options.save_as)
        save_in_float8(halves[0].graph, halves[1].graph, num_fwd_outputs, short)
    return halves


def fusing(budget: float | None) -> AbstractContextManager[Any]:
    """Tell torch's partitioner which further ops are loops that fuse, in this context.

    It saves the operands of all other ops of the backward half. A `budget` limits that by lenz's
    costs.
    """
    listed = partitioners.get_default_op_list

    def known() -> partitioners.OpTypes:
        found = listed()
        cheap, loops = ({getattr(aten, n) for n in names.split()} for names in (CHEAP, LOOPS))
        repeated = found.recomputable_ops | cheap
        return replace(found, fusible_ops=found.fusible_ops | loops, recomputable_ops=repeated)

    def within(joint_graph: Graph, node_info: Any, memory_budget: float = 1) -> list[Node]:
        return choose_saved(joint_graph, node_info, memory_budget if budget is None else budget)

    return patch.multiple(partitioners, get_default_op_list=known, choose_saved_values_set=within)


def mark(graph: Graph, backward: set[Node], native: frozenset[str]) -> None:
    """Mark the values that must be saved, and those that must not be."""
    for n in graph.nodes:
        if is_random(n.target) and n.meta.get("recompute") in AGAIN:
            for made in (n, *(u for u in n.users if u.target is operator.getitem)):
                made.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif has(n.target, "put") and n in backward:
            for x in made_of_nothing(n.args[1]):
                x.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif has(n.target, "compare"):
            for x in compared_with_own(n) - backward:  # any order: all get one mark
                x.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif is_copy_of_kept(n, backward, native) or is_product_of_read(n, backward, native):
            n.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def compared_with_own(n: Node) -> set[Node]:
    """Return the float values that are compared with a value computed from them.

    x == amax(x) holds somewhere only for the same x. A recomputed x may differ in the last place,
    since values inside the forward half are rounded to half types less often than its results.
    """

    def source(x: Any) -> Any:
        while has(x.target, "view") or x.target is aten.abs.default:
            x = x.args[0]
        return x

    if not n.args[0].meta["val"].is_floating_point():  # type: ignore[union-attr]  # a tensor
        return set()
    a, b = (source(x) for x in n.args)
    return {x for x, y in ((a, b), (b, a)) if x.op == "call_function" and x in behind(y)}


def made_of_nothing(indices: Any) -> dict[Node, None]:
    """Return the values behind index tensors that depend on no argument.

    If they are recomputed, the compiler of the gradient knows them (`lower/known.py`).
    """
    found: dict[Node, None] = {}
    for x in indices:
        seen = [] if x is None else [*behind(x)]
        if all(n.op == "call_function" and not is_random(n.target) for n in seen):
            found.update(dict.fromkeys(seen))
    return found


def behind(n: Node) -> Iterator[Node]:
    """Yield a value and those that it is computed from."""
    seen, stack = {n}, [n]
    while stack:
        yield stack[-1]
        new = [m for m in stack.pop().all_input_nodes if m not in seen]
        seen.update(new)
        stack += new


def behind_tangents(graph: Graph) -> set[Node]:
    """Return the values computed from a gradient, which can only be in the backward half."""
    found: set[Node] = set()
    for n in graph.nodes:
        is_tangent = n.op == "placeholder" and "tangents" in n.name
        if is_tangent or not found.isdisjoint(n.all_input_nodes):
            found.add(n)
    return found


def is_fused(n: Node, backward: set[Node], native: frozenset[str]) -> bool:
    """Say whether no reader needs a value from memory in backward: all are in forward, or fuse.

    Results of the graph and arguments of library calls must be in memory.
    """
    names = (str(u.target) for u in again.readers_of(n) if u in backward)
    return all(name in native or name.rpartition(".")[0] in native for name in names)


def is_free_again(n: Node, backward: set[Node], native: frozenset[str]) -> bool:
    """Say whether backward reads what costs no more than a saved value, and needs no memory there.

    It is a conversion to a larger type, as of a norm's argument under autocast, or rows that are
    looked up in a table among the arguments.
    """
    if n.target not in FREE or n in backward or "recompute" in n.meta:
        return False  # a checkpoint has a policy of its own
    source = n.all_input_nodes[0]
    x, y, is_table = source.meta["val"], n.meta["val"], n.target is aten.embedding.default
    is_free = source.op == "placeholder" if is_table else x.itemsize < y.itemsize
    is_read = is_free and x.device == y.device and not backward.isdisjoint(again.readers_of(n))
    return is_read and is_fused(n, backward, native)


def is_product_of_read(n: Node, backward: set[Node], native: frozenset[str]) -> bool:
    """Say whether loops read a product whose factors backward reads, as their gradients do.

    torch's partitioner saves it too where another reader of a factor comes first: behind a gate.
    """
    is_made = n.target is aten.mul.Tensor and n not in backward and "recompute" not in n.meta
    are_read = (not backward.isdisjoint(again.readers_of(x)) for x in n.all_input_nodes)
    return is_made and all(are_read) and is_fused(n, backward, native)


def is_copy_of_kept(n: Node, backward: set[Node], native: frozenset[str]) -> bool:
    """Say whether a value is a copy, in another layout, of what stays in memory for backward.

    That is what library calls of backward read, what loops make of such values, or the weights of a
    convolution: an argument. Views of a copy count as it does.
    """
    copy = unviewed(n)
    if copy.target is not aten.clone.default or n in backward or "recompute" in n.meta:
        return False
    x = unviewed(copy.all_input_nodes[0])
    if x.op == "placeholder":
        calls = [u for u in n.users if u.target is aten.convolution_backward.default]
        return any(u.args[2] is n for u in calls)
    return not is_fused(x, backward, native) or is_made_of_read(x, backward)


def is_made_of_read(n: Node, backward: set[Node]) -> bool:
    """Say whether a few elementwise ops make a value of what backward reads, and of arguments.

    So is the half of an activation that goes through the blocks of a CSP stage: it is made of the
    convolution that the gradient of its norm reads.
    """
    made, is_read = [n], False
    for x in made:
        is_cheap = torch.Tag.pointwise in getattr(x.target, "tags", ())
        is_cheap |= not {"_to_copy", *CHEAP.split()}.isdisjoint(str(x.target).split("."))
        if not is_cheap or len(made) > FEW:
            return False
        found = [v for v in map(unviewed, x.all_input_nodes) if v.op != "placeholder"]
        made += [v for v in found if v not in made and backward.isdisjoint(again.readers_of(v))]
        is_read |= any(v not in made for v in found)
    return is_read


def as_permute(n: Node) -> None:
    """Write a transpose as `permute`, which the partitioner treats as free."""
    x, *dims = n.args
    order = list(range(n.meta["val"].dim()))
    if order:
        a, b = (int(d) % len(order) for d in dims)  # type: ignore[arg-type]  # the schema says int
        order[a], order[b] = order[b], order[a]
    n.target, n.args = aten.permute.default, (x, order)
