"""Rare ops as compositions of other torch ops, which fuse into few kernels.

    masked_scatter_backward(dy, mask, [n])
        ==>   zeros(n + 1).scatter(0, where(mask, cumsum(mask) - 1, n), dy)[:n]

Half types are computed in float32 and rounded once. None leaves a call to eager. A smaller operand
is expanded before it is used: otherwise it would be a kernel of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lenz.frontend.values import is_same_size, widened

aten = torch.ops.aten
MEAN, MAX = 1, 2  # modes of bags
Pair = tuple[Tensor, Tensor]  # a value and its mask, or two gradients


def _owners(grad: Tensor, offsets: Tensor, bags: Tensor, count: Any) -> Tensor:
    """The bag of each index, recomputed where eager may omit it.

    Eager omits it for sums of bf16 on CPUs, where fake tensors (torch 2.13) have the full size. It
    is the number of offsets at or before the index, less one.
    """
    if is_same_size(bags.shape[0], count) and grad.dtype is not torch.bfloat16:
        return bags
    # An offset past the last index (an empty bag) goes to a position without an index.
    at = offsets.long()
    return at.new_zeros(count + 1).scatter(0, at, 1, reduce="add").cumsum(0)[:count] - 1


def embedding_bag_backward(
    grad: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, sizes: Tensor, maxima: Tensor,
    rows: int, by_frequency: bool, mode: int, sparse: bool, weights: Tensor | None = None,
    padding: int = -1,
) -> Any:  # fmt: skip
    """Add the gradient of each bag to its rows."""
    if by_frequency or sparse:
        return None
    table = grad.new_zeros(rows, grad.shape[1])
    sizes = sizes[: grad.shape[0]]  # on GPUs a last offset has a size, but no bag
    if mode == MAX:
        dy = torch.where((sizes > 0).unsqueeze(1), grad, 0.0)
        return table.scatter_add(0, maxima.long(), dy)
    owners = _owners(grad, offsets, bags, indices.shape[0])
    dy = widened(grad).index_select(0, owners)
    if weights is not None:
        dy = dy * weights.unsqueeze(1)
    if mode == MEAN:
        dy = dy / sizes.unsqueeze(1).expand_as(grad).index_select(0, owners).clamp(min=1)
    if padding >= 0:
        dy = torch.where((indices == padding).unsqueeze(1), 0.0, dy)
    return table.index_add(0, indices, dy.to(grad.dtype))


def bag_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, mode: int,
    padding: int = -1,
) -> Any:  # fmt: skip
    """For each index, the dot product of its row with the gradient of its bag."""
    owners = _owners(grad, offsets, bags, indices.shape[0])
    rows = widened(grad).index_select(0, owners) * weight.index_select(0, indices)
    total = rows.sum(1).to(weight.dtype)
    return total if padding < 0 else torch.where(indices == padding, 0.0, total)


def _quantized(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Pair:
    """(clamp(round(x / scale) + zero, low, high) - zero) scale, and a mask of unclamped ones."""
    wide = widened(x)
    scale, zero = (v.expand_as(x).to(wide.dtype) for v in (scale, zero))
    q = (wide * scale.reciprocal()).round() + zero
    # No clamp: eager turns NaN into the lowest integer.
    held = torch.where(q > low, q, float(low))
    held = torch.where(held < high, held, float(high))
    return ((held - zero) * scale).to(x.dtype), (q >= low) & (q <= high)


def per_tensor(x: Tensor, scale: float, zero: int, low: int, high: int) -> Pair:
    """Fake quantization with one scale."""
    a, b = [torch.full((), v, dtype=widened(x).dtype, device=x.device) for v in (scale, zero)]
    return _quantized(x, a, b, low, high)


def per_tensor_of_tensors(
    x: Tensor, scale: Tensor, zero: Tensor, enabled: Tensor, low: int, high: int
) -> Pair:
    """One scale, in a tensor; the identity if not enabled."""
    on = enabled.flatten()[0] != 0
    value, mask = _quantized(x, scale.flatten()[0], zero.flatten()[0], low, high)
    return torch.where(on, value, x), mask | ~on


def per_channel(x: Tensor, scale: Tensor, zero: Tensor, axis: int, low: int, high: int) -> Pair:
    """One scale per slice of a dimension."""
    shape = [-1 if d == axis else 1 for d in range(x.dim())]
    return _quantized(x, scale.view(shape), zero.view(shape), low, high)


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> Pair:
    """Gradients of w = v * g / |v|, |v| over all dimensions but `dim`, with s = sum(dw * v):

    dv = g / |v| * (dw - v * s / |v|^2)        dg = s / |v|
    """
    over = [d for d in range(v.dim()) if d != dim % v.dim()]
    dw, wide, norms = widened(grad), widened(v), widened(norms)
    s = (dw * wide).sum(over, keepdim=True) if over else dw * wide
    return (g / norms * (dw - wide * (s / (norms * norms)))).to(v.dtype), (s / norms).to(g.dtype)


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[Any]) -> Tensor:
    """The elements where the mask holds, in row-major order, padded with zeros to a known size."""
    mask, count = mask.expand_as(grad).flatten(), math.prod(sizes)
    # Elements that the mask excludes go past the end.
    at = torch.where(mask, mask.cumsum(0) - 1, count)
    return grad.new_zeros(count + 1).scatter(0, at, grad.flatten())[:count].view(sizes)


def nonzero_static(x: Tensor, *, size: Any, fill_value: int = -1) -> Tensor:
    """The indices of the first nonzero elements, one per row, padded with rows of one value."""
    rank = x.dim()
    made = x.new_full((size, rank), fill_value, dtype=torch.int64)
    if rank and not any(is_same_size(n, 0) for n in (size, *x.shape)):
        chosen = (x != 0).flatten()
        number = chosen.cumsum(0) - 1
        # Surplus rows go past the end.
        at = torch.where(chosen & (number < size), number, size)
        of_all = [torch.arange(n, device=x.device) for n in x.shape]
        places = [v.flatten() for v in torch.meshgrid(of_all, indexing="ij")]
        made = x.new_full((size + 1, rank), fill_value, dtype=torch.int64)
        made = made.scatter(0, at.unsqueeze(1).expand(-1, rank), torch.stack(places, 1))[:size]
    # ATen fills columns on GPUs.
    return made if x.is_cpu or rank < 2 else made.t().contiguous().t()


def unscaled(
    grads: Sequence[Tensor], found: Tensor, inverse: Tensor
) -> tuple[list[Tensor], Tensor] | None:
    """Gradients divided by the scale of the loss; `found` is 1 if one of them is not finite."""
    if not all(g.is_floating_point() and g.device == found.device for g in grads):
        return None
    factor, bad = inverse.flatten()[0], found != 0
    made = []
    for g in grads:
        wide = widened(g)
        bad = bad | ~torch.isfinite(wide).all()
        made.append((wide * factor.to(wide.dtype)).to(g.dtype))
    return made, torch.where(bad, 1.0, found)


def updated_scale(
    scale: Tensor, tracker: Tensor, found: Tensor, growth: float, backoff: float, interval: int
) -> Pair:
    """The scale of the loss and the steps since it changed: smaller after a step that overflowed.

    Otherwise it grows after `interval` steps, unless it would be infinite.
    """
    bad, steps = found.view(scale.shape) != 0, tracker + 1
    grown, less = ((scale.double() * by).to(scale.dtype) for by in (growth, backoff))
    is_due = steps == interval
    kept = torch.where(is_due.view(scale.shape) & torch.isfinite(grown), grown, scale)
    return torch.where(bad, less, kept), torch.where(is_due | bad.view(tracker.shape), 0, steps)


PARTS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.view_copy.default: lambda x, sizes: x.reshape(sizes).contiguous().clone(),
    aten._embedding_bag_backward.default: embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: bag_weights_backward,
    aten.fake_quantize_per_tensor_affine_cachemask.default: per_tensor,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: per_tensor_of_tensors,
    aten.fake_quantize_per_channel_affine_cachemask.default: per_channel,
    aten._weight_norm_interface_backward.default: weight_norm_backward,
    aten.masked_scatter_backward.default: masked_scatter_backward,
    aten.nonzero_static.default: nonzero_static,
    aten._amp_foreach_non_finite_check_and_unscale.default: unscaled,
    aten._amp_update_scale.default: updated_scale,
}
