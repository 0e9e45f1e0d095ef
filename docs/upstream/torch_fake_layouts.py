"""Fake tensors that tell another layout than eager's tensors have; prints each that differs.

Run on a CPU build with MKL. torch 2.11 prints all four, torch 2.13 the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten


def cut(x: Tensor) -> Tensor:
    """Widths of 0 and below: a copy in the order of x's strides. By torch's rule in Python, which
    tensors with symbolic sizes take, it is one only where all widths are below 0."""
    is_fake = type(x) is not Tensor
    pad = torch._refs.constant_pad_nd if is_fake else torch.constant_pad_nd
    return pad(x, [0, 0, 0, -1])


def mirrored(x: Tensor) -> Tensor:
    """Channels last stay; told: contiguous."""
    return aten.reflection_pad2d.default(x, [1, 1, 1, 1])


def transformed(x: Tensor) -> Tensor:
    """The transformed dimension is the innermost; told: contiguous."""
    return aten._fft_r2c.default(x, [1], 0, True)


def log_sums(x: Tensor) -> Tensor:
    """The log-sum-exp of f64 is f64; told: f32."""
    return aten._scaled_dot_product_flash_attention_for_cpu.default(x, x, x)[1]


CASES: list[tuple[Callable[[Tensor], Any], Tensor]] = [
    (cut, torch.randn(4, 5).t()),
    (mirrored, torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)),
    (transformed, torch.randn(5, 6, 7)),
    (log_sums, torch.randn(1, 2, 8, 16, dtype=torch.float64)),
]

if __name__ == "__main__":
    for fn, x in CASES:
        with FakeTensorMode() as mode:
            told = fn(mode.from_tensor(x))
        made = fn(x)
        if (told.dtype, told.stride()) != (made.dtype, made.stride()):
            pair = f"told {told.dtype} {told.stride()}, made {made.dtype} {made.stride()}"
            print(f"{fn.__name__}: {pair}")
