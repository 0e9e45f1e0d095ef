"""Convolutions of half types on CUDA run channels last.

    y = conv2d(x, w); z = conv2d(relu(y), v); return z
        ==>   y = conv2d(x.channels_last, w); z = conv2d(relu(y), v); return z.contiguous()

Tensor cores multiply with the channels innermost. For other layouts the library transposes around
each convolution. This pass converts the input of every convolution to channels last; the conversion
is free if the tensor has that layout already. AOTAutograd's trace carries the layout from one
convolution to the next, forward and backward, so that one conversion is left at each border.
Results keep their strides, and so do arguments of calls that read strides, such as `as_strided` and
custom operators. Gradients of weights, and of the first convolutions' images, have eager's strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from lenz.frontend.calls import CALLS, called, callee, fake_of, is_torch, storages, traced, writes
from lenz.frontend.values import HALVES, dense_order, is_same_size, unguarded
from lenz.machines import capabilities_of

LOOKS = ("stride", "is_contiguous", "storage_offset", "set_", "resize_", "resize_as_", "data_ptr")
WIDTH = 8  # channels that a tensor core reads at once, in half types


def channels_last(gm: GraphModule) -> None:
    """Rewrite the 2-d convolutions of Dynamo's graph, in place."""
    convolutions = convolutions_of(gm)
    output = gm.graph.output_node()
    results = {n: v for n in output.all_input_nodes if (v := fake_of(n)) is not None}
    orders = {
        n: dense_order(v.shape, v.stride()) for n, v in results.items() if n.op != "placeholder"
    }
    shown = seen_by_calls(gm, convolutions)
    views = views_of(gm) if convolutions and shown is not None else None
    # A copy cannot restore the strides of results that share memory or have gaps.
    kept = [s for n in results for s in storages(n)]
    if views is None or shown is None or None in orders.values() or len(kept) != len(set(kept)):
        return
    for n in views:  # a view may need a copy if its tensor is channels last
        n.target = "reshape"
    inner = dict.fromkeys(convolutions)
    for n in gm.graph.nodes:
        inner |= {} if inner.keys().isdisjoint(n.all_input_nodes) else {n: None}
    for n in convolutions:
        args: list[Any] = [*n.args]
        for k, order in gradient_orders(n).items():
            # Between convolutions gradients stay channels last, like images.
            if k == 1 or (k == 0 and args[0] not in inner):
                args[k] = with_gradient(gm, n, args[k], order)
        args[0] = called(gm, n, "contiguous", args[0], memory_format=torch.channels_last)
        n.args = tuple(args)
    for n, by in orders.items():
        assert by is not None
        output.replace_input_with(n, with_order(gm, output, n, by))
    for user, n, by in shown:
        user.replace_input_with(n, with_order(gm, user, n, by))
    gm.recompile()


def sees(n: Node) -> bool:
    """Say whether the values of a call may depend on the strides of its arguments."""
    if n.op not in CALLS:
        return n.op == "call_module"
    if n.op == "call_method" or is_torch(n.target):
        return callee(n).startswith("as_strided") or callee(n) in LOOKS
    return True


Seen: TypeAlias = list[tuple[Node, Node, tuple[int, ...]]]


def seen_by_calls(gm: GraphModule, changed: Sequence[Node], results: bool = False) -> Seen | None:
    """Return the calls that read strides, with their arguments that depend on `changed`.

    With `results`, the graph's caller counts as such a call. The third part is the order of the
    dimensions. None if a copy would not do: for memory with gaps or other owners, or memory that
    something writes into.
    """
    after, found = dict.fromkeys(changed), Seen()
    written = {s for n in gm.graph.nodes if writes(n) for s in storages(*n.all_input_nodes)}
    for n in gm.graph.nodes:
        taken = [a for a in n.all_input_nodes if a in after]
        if taken and n.op in (*CALLS, "call_module"):
            after[n] = None
        for a in taken if sees(n) or (results and n.op == "output") else ():
            if (v := fake_of(a)) is None:
                if any(True for _ in storages(a)):
                    return None
                continue  # a size
            order = dense_order(v.shape, v.stride())
            is_whole = is_same_size(v.untyped_storage().nbytes(), v.numel() * v.element_size())
            if order is None or not is_whole or not written.isdisjoint(storages(a)):
                return None
            found.append((n, a, order))
    return found


def convolutions_of(gm: GraphModule) -> list[Node]:
    """Return the convolutions that are faster in channels last."""
    return [n for n in gm.graph.nodes if n.target is torch.conv2d and pays(n)]


def pays(n: Node) -> bool:
    """Say whether tensor cores run a convolution and its images have another layout.

    Only channels of one group are adjacent, so many groups leave too few of them.
    """
    image, kernel, made = (fake_of(a) for a in (*n.args[:2], n))
    if image is None or kernel is None or made is None or image.dim() != 4:
        return False
    groups = n.args[6] if len(n.args) > 6 else n.kwargs.get("groups", 1)
    return bool(
        made.dtype in HALVES  # under autocast the operands may not be
        and groups == 1
        and all(isinstance(s, int) for s in image.shape)
        and kernel.shape[0] % WIDTH == 0
        and not image.is_contiguous(memory_format=torch.channels_last)
        and capabilities_of(image.device.type).products
    )


def dtype_for(n: Node, operand: torch.Tensor) -> torch.dtype:
    """Return the type in which a call reads an operand, after autocast's hidden conversion."""
    made = fake_of(n)
    if made is None or made.dtype not in HALVES or not operand.dtype.is_floating_point:
        return operand.dtype
    return made.dtype


def gradient_orders(n: Node) -> dict[Any, tuple[int, ...]]:
    """Return the dimension orders of eager's gradients of a call's operands: see `dense_order`.

    Operands are keyed by position or keyword. A call on fake tensors gives the answer.
    """
    values: Any = map_arg({**dict(enumerate(n.args)), **n.kwargs}, traced)
    tensors = {x: v for x, v in values.items() if isinstance(v, torch.Tensor)}
    wanted = [x for x, v in tensors.items() if v.requires_grad and torch.is_grad_enabled()]
    modes = [v.fake_mode for v in tensors.values() if isinstance(v, FakeTensor)]
    if not wanted or not modes:
        return {}
    with unguarded(modes[0]), torch.autograd.set_multithreading_enabled(False):  # a graph of fakes
        tensors = {x: t.detach().to(dtype_for(n, t)) for x, t in tensors.items()}
        leaves = {x: tensors[x].requires_grad_() for x in wanted}
        every, call = {**values, **tensors}, n.target
        assert callable(call)
        out = call(*[every.pop(k) for k in range(len(n.args))], **every)
        found = torch.autograd.grad(out, list(leaves.values()), torch.empty_like(out))
    orders = {x: dense_order(g.shape, g.stride()) for x, g in zip(leaves, found, strict=True)}
    return {x: order for x, order in orders.items() if order is not None}


def with_gradient(gm: GraphModule, at: Node, n: Any, order: tuple[int, ...]) -> Node:
    """Insert an identity on `n` whose gradient has the given order: that of a part is dense."""
    whole = called(gm, at, "permute", n, order)
    whole = called(gm, at, "narrow", whole, 0, 0, called(gm, at, "size", whole, 0))
    return called(gm, at, "permute", whole, tuple(order.index(d) for d in range(len(order))))


def views_of(gm: GraphModule) -> list[Node] | None:
    """Return the calls of `view`; None if something may write into the result of one."""
    found: list[Node] = []
    viewed: dict[int, None] = {}
    for n in gm.graph.nodes:
        if writes(n) and any(s in viewed for s in storages(*n.all_input_nodes)):
            return None
        if n.op == "call_method" and n.target == "view" and n.args[1:]:
            if isinstance(n.args[1], torch.dtype):
                return None
            found.append(n)
            viewed.update(dict.fromkeys(storages(n)))
    return found


def with_order(
    gm: GraphModule, at: Node, n: Node, order: tuple[int, ...], like: Node | None = None
) -> Node:
    """Insert a conversion to a result's strides; it copies nothing if they match already.

    `like` gives the sizes if `n` has no value yet.
    """
    value, is_sorted = fake_of(like or n), order == tuple(sorted(order))
    whole = n if is_sorted else called(gm, at, "permute", n, order, like=n)
    if value is not None and any(is_same_size(s, 1) for s in value.shape):
        # `contiguous` keeps strides of 1s.
        dense = called(gm, at, "clone", whole, like=n, memory_format=torch.contiguous_format)
    else:
        dense = called(gm, at, "contiguous", whole, like=n)
    back = tuple(order.index(d) for d in sorted(order))
    return dense if is_sorted else called(gm, at, "permute", dense, back, like=n)
