"""Saves the indices of pooling and the masks of relus in as few bits as possible."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from lenz.frontend.again import converted
from lenz.frontend.calls import inserter
from lenz.frontend.values import are_same, unguarded
from lenz.traits import trait

aten = torch.ops.aten
# Gradients that only read the sizes and strides of their second argument.
POOLS = ("max_pool{}d_with_indices", "adaptive_max_pool{}d", "avg_pool{}d", "_adaptive_avg_pool{}d")
SIZED = tuple([getattr(aten, f"{x.format(n)}_backward").default for x in POOLS for n in (2, 3)])
RELU = aten.threshold_backward.default
KINKED = (RELU, aten.hardtanh_backward.default, aten.leaky_relu_backward.default)
SHORTENED = 1 << 20  # bytes; less is not worth two conversions


def places_below(n: Node) -> int | None:
    """Return the bound of the numbers in a large i64 tensor of indices, if known."""
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
    """Make the backward half read i64 indices in 0 .. limit - 1 from a copy in fewer bits.

    The index in a window of known size needs 8 bits, others 16 or 32.
    """
    readers = [u for u in n.users if u in backward]
    if not readers or limit > 2**31:
        return
    call = inserter(graph, n)
    with graph.inserting_before(n.next), unguarded(n.meta["val"].fake_mode):
        windows = windows_of(call, n)
        if windows is not None:
            base, width, span = windows
            rest = call(aten.sub.Tensor, n, base)
            row = call(aten.div.Tensor_mode, rest, width, rounding_mode="floor")
            code = call(aten.sub.Tensor, rest, call(aten.mul.Tensor, row, width - span))
            code = call(aten._to_copy.default, code, dtype=torch.uint8)
            again = call(aten._to_copy.default, code, dtype=torch.int64)
            row = call(aten.div.Tensor_mode, again, span, rounding_mode="floor")
            again = call(aten.add.Tensor, again, call(aten.mul.Tensor, row, width - span))
            again = call(aten.add.Tensor, again, base)
        else:
            dtype = torch.int16 if limit <= 2**15 else torch.int32
            again = converted(call, converted(call, n, dtype), torch.int64)
    for u in readers:
        u.replace_input_with(n, again)


def windows_of(call: Callable[..., Node], n: Node) -> tuple[Node, int, int] | None:
    """Return the starts of a pool's windows, the width of its input, and the span of a window.

    An index is begin + row * width + column with row * span + column < 256. None for other ops.
    """
    source: Any = n.args[0]
    if source.target is not aten.max_pool2d_with_indices.default:
        return None
    given = [*source.args[1:], *[()] * 4][:4]  # kernel, stride, padding, dilation
    pairs = [g or u for g, u in zip(given, [None, given[0], (0, 0), (1, 1)], strict=True)]
    kernel, stride, padding, dilation = ([*p] * 2 if len(p) == 1 else p for p in pairs)
    width = source.args[0].meta["val"].shape[-1]
    high, span = ((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    if span > width or high * span > 256:
        return None
    where = {"dtype": torch.int64, "device": n.meta["val"].device}
    rows, columns = (call(aten.arange.default, s, **where) for s in n.meta["val"].shape[-2:])
    rows = call(aten.unsqueeze.default, call(aten.mul.Tensor, rows, stride[0] * width), -1)
    columns, before = call(aten.mul.Tensor, columns, stride[1]), padding[0] * width + padding[1]
    columns = call(aten.sub.Tensor, columns, before)
    return call(aten.add.Tensor, rows, columns), width, span


def without_elements(graph: Graph, n: Node) -> None:
    """Give the gradient of a pool empty memory as its input, so that the input is not saved."""
    x: Any = n.args[1]
    value = x.meta["val"]
    numbers = (*value.shape, *value.stride())
    if value.layout != torch.strided or not all(isinstance(k, int) for k in numbers):
        return
    call = inserter(graph, n)
    with graph.inserting_before(n), unguarded(value.fake_mode):
        where = {"dtype": value.dtype, "device": value.device}
        form = call(aten.empty_strided.default, list(value.shape), list(value.stride()), **where)
    n.args = (n.args[0], form, *n.args[2:])


def by_mask(graph: Graph, n: Node) -> None:
    """Make the gradient of a piecewise linear op read a mask of bytes, unless x is saved anyway.

    threshold_backward(g, x, t)   -> where(x <= t, 0, g)
    hardtanh_backward(g, x, s, t) -> where((x > s) & (x < t), g, 0)
    leaky_relu_backward(g, x, s)  -> where(x > 0, g, g * s)

    ATen compares half types in f32, except for the first op on GPUs.
    """
    g, x, *limits = n.args
    value = x.meta["val"]  # type: ignore[union-attr]  # a tensor
    call = inserter(graph, n)
    with graph.inserting_before(n), unguarded(n.meta["val"].fake_mode):
        if n.target is aten.leaky_relu_backward.default:
            scaled = call(aten.mul.Tensor, g, limits[0])
            made = call(aten.where.self, call(aten.gt.Scalar, x, 0), g, scaled)
        else:
            if any(limits) and (n.target is not RELU or value.device.type == "cpu"):
                x = converted(call, x, torch.promote_types(value.dtype, torch.float32))
            if n.target is RELU:
                made = call(aten.where.ScalarSelf, call(aten.le.Scalar, x, limits[0]), 0, g)
            else:  # NaN gives 0
                kept = [call(aten.gt.Scalar, x, limits[0]), call(aten.lt.Scalar, x, limits[1])]
                made = call(aten.where.ScalarOther, call(aten.bitwise_and.Tensor, *kept), g, 0)
    if are_same(made.meta["val"].stride(), n.meta["val"].stride()):
        n.replace_all_uses_with(made)
        graph.erase_node(n)
