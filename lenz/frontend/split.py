"""Partition a joint graph into forward and backward: which values are saved, which recomputed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils.checkpoint import CheckpointPolicy

from lenz.errors import Unsupported
from lenz.frontend.normalise import dedup, drop_noops, touched_by
from lenz.frontend.restride import corrected, mistold_by, restride
from lenz.frontend.values import HALVES, are_same, unguarded
from lenz.traits import has, trait

aten = torch.ops.aten
AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
SOFTMAX = (aten._softmax.default, aten._log_softmax.default)
NORMED = 1 << 18  # bytes; less is not worth a kernel
SHORTENED = 1 << 20  # bytes; less is not worth two conversions


def split(
    joint: GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    native: frozenset[str] = frozenset(),
    **rest: Any,
) -> tuple[GraphModule, GraphModule]:
    """Return the forward and the backward half of `joint`, by torch's min-cut partitioner.

    What the partitioner takes for a wall is taken down first: aliases, transposes by their name,
    and softmax as one op.  Equal calls are merged: the cut would otherwise save one and compute
    the other again.  What activation checkpointing would compute again from a saved state of the
    generator, dropout and attention above all, is saved instead: nothing of that could be fused.
    So is what is compared with a result of its own, as the gradient of a maximum does.
    Large tensors of places, such as those of maxima, are saved in the shortest type that holds
    them.  Norms are computed again from what their gradients read anyway.  `native` names the ops
    that the lowering takes, and may fuse.
    """
    calls = [n for n in joint.graph.nodes if n.op == "call_function"]
    wrong = {k for n in calls for k in mistold_by(n, n.meta.get("val"))}
    if 0 in wrong:  # gradients that are given to it would have the type that was told
        raise Unsupported("torch tells another type of a result than it has: operands are of two")
    if wrong:
        restride(joint, ())  # both halves are to know of the types
    drop_noops(joint.graph, touched_by(joint.graph))
    backward = behind_tangents(joint.graph)
    for n in joint.graph.nodes:
        if n.target is aten.transpose.int:
            as_permute(n)
        elif n.target in SOFTMAX and n not in backward:
            y = in_parts(joint.graph, n)
            if y is not None and all(is_fused(u, backward, native) for u in y.users):
                y.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif n.target is aten.native_layer_norm.default:
            norm_again(joint.graph, n, backward)
        elif (limit := places_below(n)) is not None:
            shorten(joint.graph, n, limit, backward)
    dedup(joint)
    for n in joint.graph.nodes:
        if is_random(n) and n.meta.get("recompute") in AGAIN:
            for made in (n, *(u for u in n.users if u.target is operator.getitem)):
                made.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif has(n.target, "put") and n in backward:
            for x in made_of_nothing(n.args[1]):
                x.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif has(n.target, "compare"):
            for x in compared_with_own(n) - backward:  # any order: all get one mark
                x.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(
        joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest
    )


def compared_with_own(n: Node) -> set[Node]:
    """Return the floats that a comparison has on one side, and what was made of them on the other.

    x == amax(x) holds somewhere for the very x of which the maximum was taken.  Computed again, it
    may differ in the last place, since the forward half rounds less to half types than its results.
    """

    def source(x: Any) -> Any:
        while has(x.target, "view") or x.target is aten.abs.default:
            x = x.args[0]
        return x

    if not n.args[0].meta["val"].is_floating_point():  # type: ignore[union-attr]  # a tensor
        return set()
    a, b = (source(x) for x in n.args)
    found: set[Node] = set()
    for x, y in ((a, b), (b, a)):
        seen, stack = {y}, [y]
        while stack and x not in seen:
            new = [m for m in stack.pop().all_input_nodes if m not in seen]
            seen.update(new)
            stack += new
        found |= {x} & seen if x.op == "call_function" else set()
    return found


def is_random(n: Node) -> bool:
    """Say whether a call draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())


def made_of_nothing(indices: Any) -> dict[Node, None]:
    """Return what index tensors are computed with, of those that no argument has a part in.

    Computed again, such positions are known where the gradient is compiled (`lower/known.py`).
    """
    found: dict[Node, None] = {}
    for x in indices:
        stack = [] if x is None else [x]
        seen = dict.fromkeys(stack)
        while stack:
            new = [m for m in stack.pop().all_input_nodes if m not in seen]
            seen.update(dict.fromkeys(new))
            stack += new
        if all(n.op == "call_function" and not is_random(n) for n in seen):
            found.update(seen)
    return found


def places_below(n: Node) -> int | None:
    """Return what the numbers of a large i64 tensor of places are below, where that is known."""
    if n.target is not operator.getitem or n.args[1] != 1:
        return None
    source: Any = n.args[0]
    last, choice = (trait(source.target, t) for t in ("places", "choice"))
    if last is None and choice is None:
        return None
    x: Any = source.args[0].meta["val"]
    value: Any = n.meta["val"]
    if last is not None:
        sizes = x.shape[-int(last) :]
    elif choice is not None and x.dim():
        dim = source.args[int(choice) :][:1] or (source.kwargs.get("dim", -1),)
        sizes = (x.shape[dim[0]],)
    else:
        return None
    if not all(isinstance(s, int) for s in (*sizes, value.numel())):
        return None
    return prod(sizes) if value.numel() * value.element_size() >= SHORTENED else None


def shorten(graph: Graph, n: Node, limit: int, backward: set[Node]) -> None:
    """Let the backward half read i64 places in 0 .. limit - 1 from a copy in 16 or 32 bits."""
    readers = [u for u in n.users if u in backward]
    if not readers or limit > 2**31:
        return

    def copy(x: Node, dtype: torch.dtype) -> Node:
        made = graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
        made.meta = {**n.meta, "val": x.meta["val"].to(dtype)}
        return made

    with graph.inserting_after(n), n.meta["val"].fake_mode:
        short = copy(n, torch.int16 if limit <= 2**15 else torch.int32)
    with graph.inserting_after(short), n.meta["val"].fake_mode:
        again = copy(short, torch.int64)
    for u in readers:
        u.replace_input_with(n, again)


def behind_tangents(graph: Graph) -> set[Node]:
    """Return what is computed from a gradient: it can only be in the backward half."""
    found: set[Node] = set()
    for n in graph.nodes:
        if (n.op == "placeholder" and "tangents" in n.name) or not found.isdisjoint(
            n.all_input_nodes
        ):
            found.add(n)
    return found


def is_fused(n: Node, backward: set[Node], native: frozenset[str]) -> bool:
    """Say whether a reader of a value needs it computed in its own loop, if at all, in backward.

    Results of the graph and arguments of library calls have to be in memory.
    """
    if n.op == "output":
        return False
    if moves_nothing(n):
        return all(is_fused(u, backward, native) for u in n.users)
    name = str(n.target)
    return n not in backward or name in native or name.rpartition(".")[0] in native


def as_permute(n: Node) -> None:
    """Spell a transpose as `permute`, which the partitioner knows to cost nothing."""
    x, *dims = n.args
    order = list(range(n.meta["val"].dim()))
    if order:
        a, b = (int(d) % len(order) for d in dims)  # type: ignore[arg-type]  # the schema says int
        order[a], order[b] = order[b], order[a]
    n.target, n.args = aten.permute.default, (x, order)


def norm_again(graph: Graph, n: Node, backward: set[Node]) -> None:
    """Let the backward half compute the result of a norm again, in place of having it saved.

        y = (x - mean) * rstd * weight + bias

    The gradient of the norm reads x and its statistics.  Those in half types are rounded, and give
    another y.
    """
    x, _, weight, bias, _ = n.args
    parts = {u.args[1]: u for u in n.users}
    if len(parts) < 3 or backward.isdisjoint(x.users):  # type: ignore[union-attr]  # it is a node
        return
    y, mean, rstd = (parts[k] for k in range(3))
    value, exact = y.meta["val"], torch.promote_types(y.meta["val"].dtype, torch.float32)
    sizes = [s for s in value.shape if isinstance(s, int)]
    is_small = len(sizes) == value.dim() and prod(sizes) * value.element_size() < NORMED
    readers = readers_of(y)
    if is_small or backward.isdisjoint(readers) or graph.output_node() in readers:
        return
    if mean.meta["val"].dtype != exact or not value.is_contiguous():
        return
    call = inserter(graph, n)
    first = next(u for u in graph.nodes if u in backward and u.op != "placeholder")
    with graph.inserting_before(first), value.fake_mode:

        def wide(a: Any) -> Any:
            is_half = a.meta["val"].dtype != exact
            return call(aten._to_copy.default, a, dtype=exact) if is_half else a

        again = call(aten.mul.Tensor, call(aten.sub.Tensor, wide(x), mean), rstd)
        if weight is not None:
            again = call(aten.mul.Tensor, again, wide(weight))
        if bias is not None:
            again = call(aten.add.Tensor, again, wide(bias))
        if value.dtype != exact:
            again = call(aten._to_copy.default, again, dtype=value.dtype)
        again = dense_as(call, value, again)
        again.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        hand_on(graph, y, again, backward)


def dense_as(call: Callable[..., Node], told: Any, made: Node) -> Node:
    """Return what a dense result was made of anew, dense too: elementwise ops follow their inputs.

    A view of the result may be none of a tensor with other strides.
    """
    if are_same(corrected(made, made.meta["val"]).stride(), told.stride()):
        return made
    return call(aten.clone.default, made, memory_format=torch.contiguous_format)


def readers_of(n: Node) -> dict[Node, None]:
    """Return who reads a value, itself or through views."""
    found: dict[Node, None] = {}
    for u in n.users:
        found.update(readers_of(u) if moves_nothing(u) else {u: None})
    return found


def moves_nothing(n: Node) -> bool:
    """Say whether a call moves no element."""
    return has(n.target, "view")


def hand_on(graph: Graph, old: Node, new: Node, backward: set[Node]) -> None:
    """Let the backward half read `new` for `old`, also where it reads views of it."""
    for u in tuple(old.users):
        if u in backward:
            u.replace_input_with(old, new)
        elif moves_nothing(u) and not backward.isdisjoint(readers_of(u)):
            view = graph.node_copy(u, lambda a: new if a is old else a)
            hand_on(graph, u, view, backward)


def inserter(graph: Graph, n: Node) -> Callable[..., Node]:
    """Return what inserts a call in the place of `n`, with its origin and a value of its own."""

    def call(op: Any, *args: Any, **kwargs: Any) -> Node:
        name = op.overloadpacket.__name__.strip("_")
        made = graph.create_node("call_function", op, args, kwargs, name)
        made.meta = {k: v for k, v in n.meta.items() if k != "tensor_meta"}
        real = [a.meta["val"] if isinstance(a, Node) else a for a in args]
        made.meta["val"] = op(*real, **kwargs)
        return made

    return call


def in_parts(graph: Graph, n: Node) -> Node | None:
    """Replace (log-)softmax of x by what it is, in f32 for half types; return the new result.

        m = max(x); e = exp(x - m); s = sum(e);   e / s   or   x - m - log(s)

    Then the backward half can have x, which is there anyway, m and s, and compute the rest again;
    as one op its whole result would be saved, for a loss over a vocabulary in f32.
    """
    x: Any = n.args[0]
    dim, value, result = n.args[1], x.meta["val"], n.meta["val"]
    known = [s for s in value.shape if isinstance(s, int)]
    if not isinstance(value, FakeTensor) or not value.dim() or 0 in known:
        return None
    if free_unbacked_symbols(value.shape[dim]):  # type: ignore[index]  # the schema says int
        return None  # there may be no element, for which softmax has no maximum to ask for

    call = inserter(graph, n)
    with graph.inserting_before(n), unguarded(value.fake_mode):
        if value.dtype in HALVES:
            x = call(aten._to_copy.default, x, dtype=torch.float32)
        shifted = call(aten.sub.Tensor, x, call(aten.amax.default, x, [dim], True))
        e = call(aten.exp.default, shifted)
        s = call(aten.sum.dim_IntList, e, [dim], True)
        if n.target is aten._softmax.default:
            y = call(aten.div.Tensor, e, s)
        else:
            y = call(aten.sub.Tensor, shifted, call(aten.log.default, s))
        if result.dtype != y.meta["val"].dtype:
            y = call(aten._to_copy.default, y, dtype=result.dtype)
        y = dense_as(call, result, y)
    n.replace_all_uses_with(y)
    graph.erase_node(n)
    return y
