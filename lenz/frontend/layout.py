"""Convolutions of half types on CUDA run channels last.

    y = conv2d(x, w); z = conv2d(relu(y), v); return z
        ==>   y = conv2d(x.channels_last, w); z = conv2d(relu(y), v); return z.contiguous()

Tensor cores multiply with the channels innermost, and for other layouts the library transposes
around each convolution.  A call asks for channels last at the input of every convolution, and is
nothing where the tensor has that layout already: AOTAutograd's trace carries it from one to the
next, forward and backward, so that one conversion is left at each border.  Results leave with the
strides they had.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from lenz.frontend.calls import called, storages, value_of, writes

HALVES = (torch.float16, torch.bfloat16)
WIDTH = 8  # channels that a tensor core takes at once, in half types


def channels_last(gm: GraphModule) -> None:
    """Rewrite the 2-d convolutions of Dynamo's graph, in place."""
    convolutions = convolutions_of(gm)
    output = gm.graph.output_node()
    results = {n: v for n in output.all_input_nodes if (v := value_of(n)) is not None}
    orders = {n: dense_order(v) for n, v in results.items() if n.op != "placeholder"}
    views = views_of(gm) if convolutions else None
    # Results that share memory, or have gaps, could not be given their strides by a copy.
    kept = [s for n in results for s in storages(n)]
    if views is None or None in orders.values() or len(kept) != len(set(kept)):
        return
    for n in views:  # a view of a tensor that is channels last may have to be a copy
        n.target = "reshape"
    for n in convolutions:
        image = called(gm, n, "contiguous", n.args[0], memory_format=torch.channels_last)
        n.args = (image, *n.args[1:])
    for n, order in orders.items():
        assert order is not None
        output.replace_input_with(n, restored(gm, output, n, order))
    gm.recompile()


def convolutions_of(gm: GraphModule) -> list[Node]:
    """Return the convolutions that would be faster channels last."""
    return [n for n in gm.graph.nodes if n.target is torch.conv2d and pays(n)]


def pays(n: Node) -> bool:
    """Say whether a convolution is one that tensor cores do, of images with other layouts.

    The channels of one group stand together, so many groups leave too few side by side.
    """
    image, kernel, made = (value_of(a) for a in (*n.args[:2], n))
    if image is None or kernel is None or made is None or image.dim() != 4:
        return False
    groups = n.args[6] if len(n.args) > 6 else n.kwargs.get("groups", 1)
    return bool(
        image.device.type == "cuda"
        and made.dtype in HALVES  # under autocast the operands need not be
        and groups == 1
        and all(isinstance(s, int) for s in image.shape)
        and kernel.shape[0] % WIDTH == 0
        and not image.is_contiguous(memory_format=torch.channels_last)
    )


def dense_order(v: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a tensor from the outermost in memory; None if it has gaps."""
    strides = v.stride()
    if not all(isinstance(s, int) for s in (*v.shape, *strides)):
        return None
    order = tuple(sorted(range(v.dim()), key=lambda d: -strides[d]))
    step = 1
    for d in reversed(order):
        if v.shape[d] != 1 and strides[d] != step:
            return None
        step *= v.shape[d]
    return order


def views_of(gm: GraphModule) -> list[Node] | None:
    """Return the calls of `view`; None if something may write into what one of them gives."""
    found: list[Node] = []
    viewed: dict[int, None] = {}
    for n in gm.graph.nodes:
        if writes(n) and any(s in viewed for a in n.all_input_nodes for s in storages(a)):
            return None
        if n.op == "call_method" and n.target == "view" and n.args[1:]:
            if isinstance(n.args[1], torch.dtype):
                return None
            found.append(n)
            viewed.update(dict.fromkeys(storages(n)))
    return found


def restored(gm: GraphModule, at: Node, n: Node, order: tuple[int, ...]) -> Node:
    """Insert what gives a result its strides; nothing is copied where it has them already."""
    if order == tuple(sorted(order)):
        return called(gm, at, "contiguous", n, like=n)
    inverse = tuple(order.index(d) for d in range(len(order)))
    outermost_first = called(gm, at, "permute", n, order, like=n)
    dense = called(gm, at, "contiguous", outermost_first, like=n)
    return called(gm, at, "permute", dense, inverse, like=n)
