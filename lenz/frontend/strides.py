"""Ops whose fake tensors have other strides than eager's tensors on CPUs.

AOTAutograd traces with fake tensors, and what lenz computes gets their strides.  Found by running
torch's op database with inputs that are transposed or channels last, each op beside its fake
(torch 2.13); results that have eager's strides either way are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

__all__ = ["TOLD_WRONG", "eager_strides", "laid_as_in_eager"]

# What the strides of the first result follow: nothing, the memory format of an argument, or all
# the strides of an argument of that shape, which is the first operand of an iteration.
Rule: TypeAlias = tuple[Literal["dense", "format", "operand"], int]
DENSE: Rule = ("dense", 0)
LAST = (0, 2, 3, 1)  # channels last, from the outermost dimension in memory
TOLD_WRONG: Mapping[str, Rule] = {
    "aten.pow.Scalar": DENSE,
    "aten.log_sigmoid_forward.default": DENSE,
    "aten.isin.Tensor_Tensor": DENSE,
    "aten.mse_loss_backward.default": DENSE,
    "aten.smooth_l1_loss_backward.default": DENSE,
    "aten.huber_loss_backward.default": DENSE,
    "aten._log_softmax_backward_data.default": DENSE,
    "aten.glu_backward.default": DENSE,
    "aten.native_batch_norm.default": ("format", 0),
    "aten._native_batch_norm_legit.no_stats": ("format", 0),
    "aten._native_batch_norm_legit_functional.default": ("format", 0),
    "aten.native_batch_norm_backward.default": ("format", 1),
    "aten.batch_norm_backward.default": ("format", 1),
    "aten.max_unpool2d.default": ("format", 0),
    "aten.channel_shuffle.default": ("format", 0),
    "aten.roll.default": ("format", 0),
    "aten.reflection_pad2d_backward.default": ("format", 1),
    "aten.replication_pad2d_backward.default": ("format", 1),
    "aten.copysign.Tensor": ("operand", 0),
    "aten.div.Tensor_mode": ("operand", 0),
    "aten.floor_divide.default": ("operand", 0),
    "aten.elu_backward.default": ("operand", 0),
    "aten.hardswish_backward.default": ("operand", 0),
    "aten.hardtanh_backward.default": ("operand", 0),
    "aten.logit_backward.default": ("operand", 0),
    "aten.native_dropout_backward.default": ("operand", 0),
    "aten.softplus_backward.default": ("operand", 0),
}


def eager_strides(op: str, args: Sequence[Any], told: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of the first result of an op of `TOLD_WRONG`; None where `told` has them.

    `args` are its (fake) arguments.  Symbolic sizes, and other devices, keep what was told.
    """
    kind, position = TOLD_WRONG[op]
    given = told if kind == "dense" else args[position]
    sizes = (*told.shape, *told.stride(), *given.shape, *given.stride())
    if told.device.type != "cpu" or not all(isinstance(s, int) for s in sizes):
        return None
    order: Sequence[int] = range(told.dim())
    if kind == "format" and given.dim() == 4 and not given.is_contiguous():
        order = LAST if given.is_contiguous(memory_format=torch.channels_last) else order
    if kind == "operand":
        own: tuple[int, ...] = given.stride() if given.shape == told.shape else (0,) * told.dim()
        order = sorted(order, key=lambda d: -own[d])
    found, step = [0] * told.dim(), 1
    for d in reversed(order):
        found[d] = step
        step *= max(1, told.shape[d])
    strides = tuple(found)
    if kind == "operand" and strides != given.stride():
        return None  # with gaps, or another shape, the fake tensor is right
    return None if strides == told.stride() else strides


def laid_as_in_eager(op: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition of an op of `TOLD_WRONG` whose result has eager's strides."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = rule(*args, **kwargs)
        if all(isinstance(t, torch.Tensor) for t in (out, args[0])):
            shared = torch._C._is_alias_of(out, args[0])  # type: ignore[attr-defined]  # no stub
            out = out.clone() if shared else out  # nothing had to move, and the parts are views
        if not isinstance(out, torch.Tensor) or (want := eager_strides(op, args, out)) is None:
            return out
        order = sorted(range(out.dim()), key=lambda d: -want[d])
        back = sorted(order, key=order.__getitem__)
        return out.permute(order).contiguous().permute(back)

    return call
