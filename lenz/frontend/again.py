"""Ops split into parts in the joint graph, so that the backward half can recompute the parts."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils.checkpoint import CheckpointPolicy

from lenz.frontend.calls import inserter
from lenz.frontend.restride import corrected
from lenz.frontend.values import HALVES, are_same, unguarded
from lenz.traits import arguments, has

aten = torch.ops.aten
NORMED = 1 << 18  # bytes; less is not worth a kernel
GROUPED = aten.native_group_norm.default
USUAL = aten._native_batch_norm_legit_no_training.default  # by the running statistics
NORMS = (
    GROUPED,
    USUAL,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update_functional.default,
)


def norm_again(graph: Graph, n: Node, backward: set[Node]) -> None:
    """Let the backward half recompute the result of a norm instead of saving it.

        y = (x - mean) * rstd * weight + bias

    The gradient of the norm reads x and its statistics. Statistics in half types are rounded and
    would give another y. Under autocast, readers of y convert it to a half type first.
    """
    x, _, weight, bias, _ = n.args
    parts = {u.args[1]: u for u in n.users}
    if len(parts) < 3 or backward.isdisjoint(x.users):  # type: ignore[union-attr]  # it is a node
        return
    y, mean, rstd = (parts[k] for k in range(3))
    value, exact = y.meta["val"], torch.promote_types(y.meta["val"].dtype, torch.float32)
    casts = [u for u in readers_of(y) if u.target is aten._to_copy.default and u not in backward]
    saved = [v for v in (y, *casts) if is_read_by(backward, v)]
    is_usual = mean.meta["val"].dtype == exact and value.is_contiguous()
    if is_small(value) or not saved or not is_usual:
        return
    call = inserter(graph, n)
    first = next(u for u in graph.nodes if u in backward and u.op != "placeholder")
    with graph.inserting_before(first), value.fake_mode:
        again = call(aten.mul.Tensor, call(aten.sub.Tensor, converted(call, x, exact), mean), rstd)
        for op, operand in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
            if operand is not None:
                again = call(op, again, converted(call, operand, exact))
        made = {y: dense_as(call, value, converted(call, again, value.dtype))}
        for v in saved:
            new = repeated(graph, v, made)
            new.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            hand_on(graph, v, new, backward)


def repeated(graph: Graph, n: Node, made: dict[Node, Node]) -> Node:
    """Return the value again, made by the same views and conversions from what is in `made`."""
    if n not in made:
        x: Any = n.args[0]
        made[n] = graph.node_copy(n, lambda a: repeated(graph, x, made) if a is x else a)
    return made[n]


def is_read_by(backward: set[Node], n: Node) -> bool:
    """Say whether the backward half reads a value that no caller gets."""
    readers = readers_of(n)
    return not backward.isdisjoint(readers) and not any(r.op == "output" for r in readers)


def is_small(value: torch.Tensor) -> bool:
    """Say whether a norm of known sizes has too few elements to be split into parts."""
    sizes = [s for s in value.shape if isinstance(s, int)]
    return len(sizes) == value.dim() and prod(sizes) * value.element_size() < NORMED


def norm_in_parts(graph: Graph, n: Node, backward: set[Node]) -> None:
    """Express the result of a batch or group norm by its statistics, which the op still computes.

        y = (x - mean) * (rstd * weight) + bias

    The gradient of the norm reads x and the statistics anyway. So the backward half recomputes y,
    and can recompute values made from it such as the argument of an activation. The first op is
    marked: torch's partitioner would save its result wherever x is not the result of a library.
    """
    given = {a.name: v for a, v in arguments(n)}
    x, parts = given["input"], {u.args[1]: u for u in n.users}
    y, mean, rstd = (parts.get(k) for k in range(3))
    if y is None or graph.output_node() in y.users or backward.isdisjoint(x.users):
        return
    value, exact = y.meta["val"], torch.promote_types(y.meta["val"].dtype, torch.float32)
    is_usual = not given.get("training", n.target is not USUAL)
    if is_usual:
        mean, rstd = given["running_mean"], given["running_var"]
    if is_small(value) or any(s is None or s.meta["val"].dtype != exact for s in (mean, rstd)):
        return
    if not are_same(value.stride(), x.meta["val"].stride()) or isinstance(given.get("C"), Node):
        return  # the channels of a group would be a size to compute
    for u in parts.values():
        n.append(u)  # right behind the op
    call, ones = inserter(graph, n), [1] * (value.dim() - 2)
    with graph.inserting_before(next(iter(parts.values())).next), unguarded(value.fake_mode):

        def along(a: Any) -> Node:
            """Broadcast per-channel or per-group numbers over the elements of x."""
            if a.meta["val"].dim() == 1:
                return call(aten.view.default, converted(call, a, exact), [-1, *ones])
            each = given["C"] // given["group"]
            a = call(aten.expand.default, call(aten.unsqueeze.default, a, -1), [-1, -1, each])
            a = call(aten.clone.default, a, memory_format=torch.contiguous_format)
            return call(aten.view.default, a, [-1, given["C"], *ones])

        if is_usual:
            rstd = call(aten.rsqrt.default, call(aten.add.Tensor, rstd, given["eps"]))
        wide = converted(call, x, exact)
        made = call(aten.sub.Tensor, wide, along(mean))
        (made if wide is x else wide).meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        factor = along(rstd)
        if given["weight"] is not None:
            factor = call(aten.mul.Tensor, factor, along(given["weight"]))
        made = call(aten.mul.Tensor, made, factor)
        if given["bias"] is not None:
            made = call(aten.add.Tensor, made, along(given["bias"]))
        made = converted(call, made, value.dtype)
    y.replace_all_uses_with(made)


def dropout_in_parts(graph: Graph, n: Node) -> None:
    """Express the result of dropout by its mask, so that it can be recomputed.

    y = x * where(mask, 1 / (1 - p), 0)
    """
    x, p, train = n.args
    parts = {u.args[1]: u for u in n.users}
    y, mask = (parts.get(k) for k in range(2))
    if train is False or y is None or mask is None:
        return
    for u in parts.values():
        n.append(u)
    value, call = y.meta["val"], inserter(graph, n)
    exact = torch.promote_types(value.dtype, torch.float32)
    keep = 1.0 - float(p)  # type: ignore[arg-type]  # the schema says float
    with graph.inserting_before(n.next.next.next), unguarded(value.fake_mode):
        factor = call(aten.mul.Tensor, converted(call, mask, exact), 1.0 / keep if keep else 0.0)
        made = call(aten.mul.Tensor, converted(call, x, exact), factor)
        made = dense_as(call, value, converted(call, made, value.dtype))
    y.replace_all_uses_with(made)


def dense_as(call: Callable[..., Node], told: Any, made: Node) -> Node:
    """Make the recomputed form of a dense result dense too: elementwise ops follow their inputs.

    A view of the result may not be possible with other strides.
    """
    if are_same(corrected(made, made.meta["val"]).stride(), told.stride()):
        return made
    return call(aten.clone.default, made, memory_format=torch.contiguous_format)


def readers_of(n: Node) -> dict[Node, None]:
    """Return the readers of a value, direct or through views."""
    found, stack = dict[Node, None](), [n]
    while stack:
        users = stack.pop().users
        found |= dict.fromkeys(u for u in users if not has(u.target, "view"))
        stack += [u for u in users if has(u.target, "view")]
    return found


def hand_on(graph: Graph, old: Node, new: Node, backward: set[Node]) -> None:
    """Let the backward half read `new` instead of `old`, also through views."""
    for u in tuple(old.users):
        if u in backward:
            u.replace_input_with(old, new)
        elif has(u.target, "view") and not backward.isdisjoint(readers_of(u)):
            hand_on(graph, u, graph.node_copy(u, lambda a: new if a is old else a), backward)


def converted(call: Callable[..., Node], a: Any, dtype: torch.dtype) -> Any:
    """Return a node converted to a type, or itself if it has that type."""
    return a if a.meta["val"].dtype == dtype else call(aten._to_copy.default, a, dtype=dtype)


def softmax_in_parts(graph: Graph, n: Node) -> Node | None:
    """Replace (log-)softmax of x by its formula, in f32 for half types; return the new result.

        m = max(x); e = exp(x - m); s = sum(e);   e / s   or   x - m - log(s)

    Then the backward half keeps m, s and x, which is alive anyway, and recomputes the rest. As one
    op its whole result would be saved, in f32 for a loss over a vocabulary.
    """
    x: Any = n.args[0]
    dim, value, result = n.args[1], x.meta["val"], n.meta["val"]
    known = [s for s in value.shape if isinstance(s, int)]
    if not isinstance(value, FakeTensor) or not value.dim() or 0 in known:
        return None
    if free_unbacked_symbols(value.shape[dim]):  # type: ignore[index]  # the schema says int
        return None  # it may be empty, and the maximum of nothing is an error

    call = inserter(graph, n)
    with graph.inserting_before(n), unguarded(value.fake_mode):
        if value.dtype in HALVES:
            x = converted(call, x, torch.float32)
        shifted = call(aten.sub.Tensor, x, call(aten.amax.default, x, [dim], True))
        e = call(aten.exp.default, shifted)
        s = call(aten.sum.dim_IntList, e, [dim], True)
        if n.target is aten._softmax.default:
            y = call(aten.div.Tensor, e, s)
        else:
            y = call(aten.sub.Tensor, shifted, call(aten.log.default, s))
        y = dense_as(call, result, converted(call, y, result.dtype))
    n.replace_all_uses_with(y)
    graph.erase_node(n)
    return y
