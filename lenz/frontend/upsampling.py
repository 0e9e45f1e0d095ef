"""Upsampling: one op for autograd on CPUs, with the factors that eager uses.

torch decomposes it before autograd, so its gradient is one scatter per corner: a training step of
the op takes 0.8 to 3.5 times as long as in eager (f32, one core). On CPUs it stays one op, and the
forward half is decomposed later. GPUs keep the scatters, with 0.02 to 0.8 of eager's time (H100).
So do symbolic sizes: fake tensors have no rule for ATen's gradient op with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import decomposition_table, decompositions
from torch.fx.experimental.symbolic_shapes import guard_or_false

sizes_of: Any = decompositions.upsample_compute_output_size
KEYS = DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA
NAMES = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
)  # fmt: skip


@contextmanager
def upsampling() -> Iterator[None]:
    """Let autograd see the ops of `NAMES` on CPUs, where it would see their decompositions."""
    packets = [getattr(torch.ops.aten, name) for name in NAMES]
    try:
        for p, key in product(packets, KEYS):
            p.vec.py_impl(key)(_differentiated(p.default))
        yield
    finally:
        for p, key in product(packets, KEYS):
            p.vec.py_kernels.pop(key, None)
            p.vec._dispatch_cache.clear()


def _differentiated(op: Any) -> Callable[..., Any]:
    """The overload `vec` of an op, which takes sizes or factors, by ATen's autograd."""
    whole = "bicubic" not in str(op)

    def vec(*args: Any) -> Any:
        x, sizes, *corners, factors = args
        sizes = sizes_of(x.shape, sizes, factors)
        scales = _scales(str(op), x, sizes, factors or [None] * len(sizes))
        # torch's fake kernel fails for an empty batch (docs/upstream/torch_empty_upsampling.py).
        is_known = whole and x.is_cpu and all(isinstance(n, int) and n for n in x.shape)
        if is_known or _in_bytes(str(op), x):
            return op._op_dk(DispatchKey.Autograd, x, sizes, *corners, *scales)
        return decomposition_table[op](x, sizes, *corners, *scales)

    return vec


def scaled_as_in_eager(op: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition, changed to use eager's factors if the op is one of `NAMES`."""
    name = str(op)
    if name.removeprefix("aten.").removesuffix(".default") not in NAMES:
        return rule

    def call(x: Tensor, sizes: Sequence[Any], *rest: Any) -> Any:
        if _in_bytes(name, x):
            return NotImplemented
        corners = 0 if "nearest" in name else 1
        return rule(x, sizes, *rest[:corners], *_scales(name, x, sizes, rest[corners:]))

    return call


def _in_bytes(name: str, x: Tensor) -> bool:
    """Whether ATen computes with 16-bit weights, which no decomposition does: bytes on CPUs."""
    return x.is_cpu and x.dtype is torch.uint8 and "nearest" not in name


def _scales(name: str, x: Tensor, sizes: Sequence[Any], scales: Sequence[Any]) -> list[Any]:
    """The factors, None for those that eager ignores.

    On CPUs, linear interpolation ignores the factor of a dimension that keeps its size, and the
    nearest neighbour also that of one which doubles (ATen: native/cpu/UpSampleKernel.cpp). On GPUs,
    images that keep all sizes are copied, and the nearest neighbour in two dimensions ignores the
    factor of a kept size (native/cuda/UpSampleBilinear2d.cu and others).
    """
    on_cpu, is_nearest = x.is_cpu, "nearest" in name
    is_used = "exact" in name or "bicubic" in name if on_cpu else is_nearest and "2d" not in name
    if is_used or not any(scales):
        return list(scales)
    times = (1, 2) if on_cpu and is_nearest else (1,)
    pairs = zip(x.shape[2:], sizes, strict=True)
    kept = [any(guard_or_false(k * n == m) for k in times) for n, m in pairs]
    kept = kept if on_cpu or is_nearest else [all(kept)] * len(kept)
    return [None if k else s for k, s in zip(kept, scales, strict=False)]
