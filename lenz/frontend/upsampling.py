"""Interpolation: one op for autograd on CPUs, with the factors that eager uses.

torch decomposes it before autograd, so its gradient is one scatter per corner: a training step of
the op takes 0.8 to 3.5 times as long as in eager (f32, one core). On CPUs it stays one op, and the
forward half is decomposed later. GPUs keep the scatters, with 0.02 to 0.8 of eager's time (H100).
So do symbolic sizes: fake tensors have no rule for ATen's gradient op with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import decomposition_table, decompositions
from torch._prims_common import get_computation_dtype, suggest_memory_format
from torch.fx.experimental.symbolic_shapes import guard_or_false

from lenz.frontend.refusals import UPSAMPLED, is_refused

NAMES = UPSAMPLED.split()


def differentiated(op: Any) -> Callable[..., Any]:
    """The overload `vec` of an op, which takes sizes or factors, by ATen's autograd."""
    whole = "bicubic" not in str(op)

    def vec(*args: Any) -> Any:
        x, sizes, *corners, factors = args
        sizes = decompositions.upsample_compute_output_size(x.shape, sizes, factors)  # type: ignore[no-untyped-call]  # torch's
        scales = _scales(str(op), x, sizes, factors or [None] * len(sizes))
        # torch's fake kernel fails for an empty batch (docs/upstream/torch_empty_upsampling.py).
        is_known = whole and x.is_cpu and all(isinstance(n, int) and n for n in x.shape)
        if is_known or _in_bytes(str(op), x) or is_refused(op._opname, (x, sizes), {}):
            return op._op_dk(DispatchKey.Autograd, x, sizes, *corners, *scales)
        return _computed(str(op), decomposition_table[op], x, sizes, *corners, *scales)

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
        scales = _scales(name, x, sizes, rest[corners:])
        return _computed(name, rule, x, sizes, *rest[:corners], *scales)

    return call


def _computed(
    name: str, rule: Callable[..., Any], x: Tensor, sizes: Sequence[Any], *rest: Any
) -> Tensor:
    if not x.is_cpu and "nearest" not in name and all(_keeps(x, sizes)):
        return x.clone(memory_format=suggest_memory_format(x))
    if "linear" in name:
        y = _linear(x, sizes, *rest)
    elif "nearest" in name:
        y = _nearest(x, sizes, "exact" in name, *rest)
    else:
        y = rule(x, sizes, *rest)
    # torch's drop channels last of fewer than 16 channels on GPUs, and leave rows in their order.
    return y.contiguous(memory_format=suggest_memory_format(x))


def _keeps(x: Tensor, sizes: Sequence[Any], times: int = 1) -> list[bool]:
    """For each dimension, whether the result is `times` as long as the image."""
    return [guard_or_false(times * n == m) for n, m in zip(x.shape[2:], sizes, strict=True)]


def _nearest(x: Tensor, sizes: Sequence[Any], exact: bool, *scales: float | None) -> Tensor:
    """The nearest pixel before the place, or the one around it; never one past the end."""
    index: list[Tensor | None] = [None, None]
    for d, (n, m, s) in enumerate(zip(x.shape[2:], sizes, scales, strict=True)):
        at = torch.arange(m, device=x.device).to(torch.float32) + (0.5 if exact else 0.0)
        at = (at * (1 / s if s else n / m)).to(torch.int64).clamp(0, n - 1)
        index.append(at.reshape(-1, *[1] * (len(sizes) - 1 - d)))
    return torch.ops.aten._unsafe_index.Tensor(x, index)  # type: ignore[no-any-return]  # any op


def _linear(x: Tensor, sizes: Sequence[Any], align: bool, *scales: float | None) -> Tensor:
    """Linear interpolation with a weight for each neighbour, `w0 * a + w1 * b`, as in ATen.

    torch's decomposition computes `a + (b - a) * w1`: NaN for two infinite pixels, and for a weight
    near 1 an error of the size of `a`. `x` is [N, C, *n], the result [N, C, *sizes].
    """
    dtype = get_computation_dtype(x.dtype)
    pairs: list[Any] = []
    rows = zip(x.shape[2:], sizes, _keeps(x, sizes), scales, strict=True)
    for d, (n, m, kept, s) in enumerate(rows):
        at = torch.arange(m, device=x.device).to(dtype)
        if align:
            at = at * ((n - 1) / (m - 1) if m > 1 else 0.0)
        else:
            at = ((at + 0.5) * (1 / s if s else n / m) - 0.5).clamp(min=0)
        at = at.reshape(-1, *[1] * (len(sizes) - 1 - d))
        low = at.to(torch.int64).clamp(0, n - 1)
        high = low if kept and x.is_cpu else (low + 1).clamp(max=n - 1)
        part = (at - low).clamp(0, 1)
        pairs.append(((low, 1 - part), (high, part)))
    index = torch.ops.aten._unsafe_index.Tensor
    found: list[Tensor]
    found = [index(x, [None, None, *[p for p, _ in c]]).to(dtype) for c in product(*pairs)]
    for (_, first), (_, second) in reversed(pairs):
        found = [a * first + b * second for a, b in zip(found[::2], found[1::2], strict=True)]
    return found[0].to(x.dtype)


def _is_by_channels(x: Tensor, sizes: Sequence[Any]) -> bool:
    """Whether ATen's kernel for channels last takes an image on CPUs; it takes small ones too."""
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(len(sizes))
    is_last = last is not None and x.is_contiguous(memory_format=last)
    is_small = len(sizes) == 2 and guard_or_false(sizes[0] + sizes[1] <= 128)
    return is_small or (is_last and guard_or_false(x.shape[1] > 3))


def _in_bytes(name: str, x: Tensor) -> bool:
    """Whether ATen computes with 16-bit weights, which no decomposition does: bytes on CPUs."""
    return x.is_cpu and x.dtype is torch.uint8 and "nearest" not in name


def _scales(name: str, x: Tensor, sizes: Sequence[Any], scales: Sequence[Any]) -> list[Any]:
    """The factors, None for those that eager ignores.

    On CPUs, linear interpolation ignores the factor of a dimension that keeps its size, and one of
    two kernels for the nearest neighbour also that of one which doubles (ATen:
    native/cpu/UpSampleKernel.cpp). On GPUs, images that keep all sizes are copied, and the nearest
    neighbour in two dimensions ignores the factor of a kept size
    (native/cuda/UpSampleBilinear2d.cu and others).
    """
    is_nearest = "nearest" in name
    is_used = not is_nearest or "2d" not in name
    if x.is_cpu:
        is_used = "exact" in name or "bicubic" in name
        is_used = is_used or (is_nearest and not _is_by_channels(x, sizes))
    scales = [*scales, *[None] * (len(sizes) - len(scales))]
    if is_used or not any(scales):
        return scales
    kept = _keeps(x, sizes)
    if x.is_cpu and is_nearest:
        kept = [a or b for a, b in zip(kept, _keeps(x, sizes, 2), strict=True)]
    return [None if k else s for k, s in zip(kept, scales, strict=True)]
