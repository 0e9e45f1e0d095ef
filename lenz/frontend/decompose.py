"""Which aten ops AOTAutograd decomposes before lenz sees the graph.

A decomposition adds nodes, and every stage of AOTAutograd traces each of them with fake tensors;
`lower/` takes a composite op in microseconds.  So an op with a lowering stays whole, and so does an
op whose library call beats any fusion.  All other ops are decomposed into pointwise ops and
reductions, which fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._decomp import _core_aten_decompositions_post_autograd, decomposition_table

from lenz.frontend.cells import CELLS
from lenz.frontend.refusals import kept_whole
from lenz.frontend.strides import laid_as_in_eager, rule_of
from lenz.frontend.upsampling import scaled_as_in_eager
from lenz.machines import capabilities_of
from lenz.traits import has

LAST = torch.channels_last


@lru_cache(maxsize=4)
def decompositions(native: frozenset[str]) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Return the decomposition table for AOTAutograd.

    `native` holds the ops that `lower/` takes natively, as "aten.gelu.default" (one overload) or
    "aten.gelu" (all overloads). Every other op with a decomposition in torch's core table, or with
    the trait `parts`, is decomposed unless it is a library call; so are `CELLS`. The table is
    shared: do not write into it.
    """
    table: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
    core = _core_aten_decompositions_post_autograd()
    for op, rule in decomposition_table.items():
        if not isinstance(op, torch._ops.OpOverload):
            continue
        name = str(op)  # "aten.gelu.default"
        packet = name.rsplit(".", 1)[0]
        is_kept = op not in core and not has(name, "parts")
        if not (is_kept or name in native or packet in native or has(name, "library")):
            laid = rule if rule_of(op) is None else laid_as_in_eager(op, rule)
            table[op] = kept_whole(packet, scaled_as_in_eager(op, laid))
    table |= CELLS
    windows = torch.ops.aten.unfold_backward.default
    table[windows] = partial(unfold_backward, table[windows])
    table[torch.ops.aten.convolution.default] = convolution
    table[torch.ops.aten.convolution_backward.default] = convolution_backward
    return table


def unfold_backward(rule: Any, dy: Tensor, sizes: Sequence[Any], d: int, *window: int) -> Any:
    """Expand windows that several rows share, as those of `istft` do.

    Otherwise torch's rule (2.13) is an `index_add` for each element of a window.
    """
    if dy.dim() == len(sizes) + 1 > 1:
        d %= len(sizes)
        dy = dy.expand(*sizes[:d], dy.shape[d], *sizes[d + 1 :], dy.shape[-1])
    return rule(dy, sizes, d, *window)


def convolution(x: Tensor, w: Tensor, b: Tensor | None, *rest: Any) -> Any:
    """On a GPU, add the bias and lay out the weights by kernels that fuse with others.

    ATen adds a bias in a kernel of its own, and copies weights to channels last in a slow one: 22
    convolutions of a U-Net for one image spend 108 us of 477 on both (H100, bf16).
    """
    laid = laid_like(x, w, rest[-1])
    if laid is w and (b is None or not capabilities_of(x.device.type).products):
        return NotImplemented
    y = torch.ops.aten.convolution.default(x, laid, None, *rest)
    return y if b is None else y + b.reshape(-1, *[1] * (x.dim() - 2))


def convolution_backward(dy: Tensor, x: Tensor, w: Tensor, *rest: Any) -> Any:
    """On a GPU, lay out the weights as forward does; sum the bias's gradient by a loop of ours.

    ATen's takes 12% of a training step of EfficientFormer-L1, and 8% of VGG-16's (H200, bf16).
    """
    *given, (of_x, of_w, of_bias) = rest
    laid = laid_like(x, w, given[-1]) if of_x else w  # without, only their sizes are read
    if laid is w and not (of_bias and capabilities_of(x.device.type).products):
        return NotImplemented
    dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, laid, *given, [of_x, of_w, False])
    return dx, dw, dy.sum([0, *range(2, dy.dim())]) if of_bias else None


def laid_like(x: Tensor, w: Tensor, groups: int) -> Tensor:
    """Return a convolution's weights, on a GPU in channels last if the images are."""
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=LAST) and not x.is_contiguous()
    moves = is_last and groups == 1 and capabilities_of(x.device.type).products
    return w.contiguous(memory_format=LAST) if moves else w
