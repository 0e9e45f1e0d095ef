"""Ops whose fake tensors have other strides than eager's tensors on CPUs.

AOTAutograd traces with fake tensors, and what lenz computes gets their strides.  Found by running
torch's op database with inputs that are transposed or channels last, each op beside its fake
(torch 2.13); results that have eager's strides either way are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from lenz.frontend.values import are_same

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


def eager_strides(op: str, args: Sequence[Any], told: torch.Tensor) -> tuple[Any, ...] | None:
    """The strides of the first result of an op of `TOLD_WRONG`; None where `told` has them.

    `args` are its (fake) arguments; no guard is made.  Other devices keep what was told, and so
    do symbolic sizes where strides would have to be put in order.
    """
    kind, position = TOLD_WRONG[op]
    given = told if kind == "dense" else args[position]
    if told.device.type != "cpu" or not isinstance(given, torch.Tensor):
        return None  # a number has no strides that a result could have
    strides = dense(told.shape, range(told.dim()))
    if kind == "format" and given.dim() == 4 and told.dim() == 4:
        if are_same(given.stride(), dense(given.shape, LAST)):
            strides = dense(told.shape, LAST)
    elif kind == "operand":
        own: tuple[Any, ...] = given.stride()
        if not all(isinstance(s, int) for s in own) or not are_same(given.shape, told.shape):
            return None
        strides = dense(told.shape, sorted(range(told.dim()), key=lambda d: -own[d]))
        if not are_same(strides, own):
            return None  # with gaps the fake tensor is right
    return None if are_same(strides, told.stride()) else strides


def dense(shape: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """The strides without gaps for dimensions in an order, the outermost first."""
    found: list[Any] = [0] * len(shape)
    step: Any = 1
    for d in reversed(order):
        found[d] = step
        step = step * (max(1, shape[d]) if isinstance(shape[d], int) else shape[d])
    return tuple(found)


def laid_as_in_eager(op: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition of an op of `TOLD_WRONG` whose result has eager's strides."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = rule(*args, **kwargs)
        if all(isinstance(t, torch.Tensor) for t in (out, args[0])):
            shared = torch._C._is_alias_of(out, args[0])  # type: ignore[attr-defined]  # no stub
            out = out.clone() if shared else out  # nothing had to move, and the parts are views
        if not isinstance(out, torch.Tensor) or (want := eager_strides(op, args, out)) is None:
            return out
        order = list(range(out.dim()))
        if all(isinstance(s, int) for s in want):
            order.sort(key=lambda d: -want[d])
        elif out.dim() == 4 and are_same(want, dense(out.shape, LAST)):
            order = list(LAST)
        back = [order.index(d) for d in range(out.dim())]
        return out.permute(order).contiguous().permute(back)

    return call
