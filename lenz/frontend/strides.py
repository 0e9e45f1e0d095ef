"""Ops whose fake tensors have other strides than eager's tensors.

AOTAutograd traces with fake tensors, and what lenz computes gets their strides.  Found by running
torch's op database with inputs that are transposed or channels last, and all elementwise ops of two
tensors with broadcast inputs in all orders, each op beside its fake (torch 2.13); results that have
eager's strides either way are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lenz.frontend.values import are_same, is_same_size

# What the strides of the first result follow: nothing, or the memory format of an argument (both
# measured on CPUs alone); nothing, on GPUs alone ("there"); or the order in which an iteration over
# all operands takes dimensions; of "power" that tensor is the exponent of a number first, which
# gives a dense one. "roll" has the format of its argument where two parts are joined in each step,
# and is dense where one is empty. "cut" and "fourier" have functions of their own.
Kind: TypeAlias = Literal["dense", "there", "format", "roll", "iteration", "power"]
Rule: TypeAlias = tuple[Kind | Literal["cut", "fourier"], int]
DENSE: Rule = ("dense", 0)
ITERATION: Rule = ("iteration", 0)
# Whose second result has the type of sums of the first, which torch 2.11 tells as f32 for f64 too.
LOG_SUM = "aten._scaled_dot_product_flash_attention_for_cpu.default"
LAST = (0, 2, 3, 1)  # channels last, from the outermost dimension in memory
TOLD_WRONG: Mapping[str, Rule] = {
    "aten.pow.Scalar": ("power", 0),
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
    "aten.roll.default": ("roll", 0),
    "aten.pixel_shuffle.default": ("there", 0),
    "aten.pixel_unshuffle.default": ("there", 0),
    "aten.constant_pad_nd.default": ("cut", 0),
    "aten._fft_c2c.default": ("fourier", 0),
    "aten._fft_r2c.default": ("fourier", 1),
    "aten._fft_c2r.default": ("fourier", 1),
    "aten.reflection_pad2d.default": ("format", 0),
    "aten.replication_pad2d.default": ("format", 0),
    "aten.reflection_pad2d_backward.default": ("format", 1),
    "aten.replication_pad2d_backward.default": ("format", 1),
    "aten.copysign.Tensor": ITERATION,
    "aten.heaviside.default": ITERATION,
    "aten.ldexp.Tensor": ("power", 1),
    "aten.logaddexp.default": ITERATION,
    "aten.logaddexp2.default": ITERATION,
    "aten.logical_and.default": ITERATION,
    "aten.logical_or.default": ITERATION,
    "aten.logical_xor.default": ITERATION,
    "aten.special_xlog1py.default": ITERATION,
    "aten.xlogy.Tensor": ITERATION,
    "aten.div.Tensor_mode": ITERATION,
    "aten.floor_divide.default": ITERATION,
    "aten.elu_backward.default": ITERATION,
    "aten.hardswish_backward.default": ITERATION,
    "aten.hardtanh_backward.default": ITERATION,
    "aten.logit_backward.default": ITERATION,
    "aten.native_dropout_backward.default": ITERATION,
    "aten.softplus_backward.default": ITERATION,
}


def eager_strides(op: str, args: Sequence[Any], told: torch.Tensor) -> tuple[Any, ...] | None:
    """The strides of the first result of an op of `TOLD_WRONG`; None where `told` has them.

    `args` are its (fake) arguments; no guard is made.  Symbolic sizes keep what was told where
    strides would have to be put in order, and so do other devices where only CPUs were measured.
    """
    kind, position = TOLD_WRONG[op]
    if kind in ("iteration", "power", "cut", "fourier"):
        given = [(a.shape, a.stride()) for a in args if isinstance(a, torch.Tensor)]
        if kind == "power":
            shape = given[position][0]
            given[position] = (shape, dense(shape, range(len(shape))))
        if kind == "fourier":
            order = transformed(args[0], args[1], position)
        else:
            order = cut(*args[:2]) if kind == "cut" else iteration(told.shape, given)
        strides = told.stride() if order is None else dense(told.shape, order)
        return None if are_same(strides, told.stride()) else strides
    source = told if kind in ("dense", "there") else args[position]
    measured = "cuda" if kind == "there" else "cpu"
    if told.device.type != measured or not isinstance(source, torch.Tensor):
        return None  # a number has no strides that a result could have
    strides = dense(told.shape, range(told.dim()))
    follows = kind == "format" or (kind == "roll" and _is_joined(*args))
    is_image = follows and source.dim() == told.dim() == 4
    if is_image and are_same(source.stride(), dense(source.shape, LAST)):
        strides = dense(told.shape, LAST)
    return None if are_same(strides, told.stride()) else strides


def cut(x: torch.Tensor, pad: Sequence[Any]) -> list[int] | None:
    """The order of dimensions of a copy of what padding leaves, if it surely adds nothing.

    So does eager; torch's rule for fake tensors, where sizes are symbols, does not for widths of 0.
    """
    if not all(statically_known_true(p <= 0) for p in pad):
        return None
    return iteration(x.shape, [(x.shape, x.stride())])


def transformed(x: torch.Tensor, dims: Sequence[int], kept: int) -> list[int] | None:
    """The order of dimensions of a Fourier transform on CPUs, by MKL; `kept` of `dims` stay last.

    Others keep the order that they have in `x`, those that are transformed inside of the rest. So
    do the fake tensors of torch 2.13; in 2.11 they sort them the other way, or not at all.
    """
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # so in torch
    if x.device.type != "cpu" or not dims or not has_mkl:
        return None
    steps = x.stride()
    known = all(isinstance(s, int) for s in steps)
    by_step = sorted(range(x.dim()), key=lambda d: -steps[d] if known else 0)
    order = by_step if known else iteration(x.shape, [(x.shape, steps)])
    if order is None:
        return None
    last = list(dims[len(dims) - kept :])
    moved = [d for d in order if d in dims and d not in last]
    return [d for d in order if d not in dims] + moved + last


def _is_joined(x: torch.Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> bool:
    """True where every step of a roll puts two parts together, as far as sizes are known."""
    steps = [(k, x.shape[d]) for k, d in zip(shifts, dims, strict=False)]
    known = [k % n for k, n in steps if isinstance(k, int) and isinstance(n, int) and n]
    return bool(dims) and 0 not in known


def iteration(shape: Sequence[Any], operands: Sequence[tuple[Any, Any]]) -> list[int] | None:
    """The dimensions, outermost first, as ATen's TensorIterator orders them.

    `operands` are shapes and strides.  It sorts by insertion.  Of two dimensions, the first operand
    that has both, neither broadcast, with different strides decides; equal strides put the larger
    dimension outside.  None where symbolic strides leave open which is larger; no guard is made.
    """

    def step(operand: tuple[Any, Any], d: int) -> Any:
        sizes, strides = operand
        own = d - len(shape) + len(sizes)
        return strides[own] if own >= 0 and is_same_size(sizes[own], shape[d]) else 0

    def is_outside(a: int, b: int) -> bool | None:
        for t in operands:
            p, q = step(t, a), step(t, b)
            if any(isinstance(s, int) and s == 0 for s in (p, q)):
                continue
            same = is_same_size(p, q)
            x, y = (shape[a], shape[b]) if same else (p, q)
            if statically_known_true(x > y):
                return True
            if not statically_known_true(x <= y):
                raise ValueError("no order")
            if not same:
                return False
        return None

    order = list(reversed(range(len(shape))))  # the innermost first
    try:
        for first in range(1, len(order)):
            at = first
            for k in reversed(range(first)):
                outside = is_outside(order[k], order[at])
                if outside:
                    order[k], order[at] = order[at], order[k]
                    at = k
                elif outside is not None:
                    break
    except ValueError:
        return None
    return order[::-1]


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
