"""On CPUs, upsampling stays one op while autograd differentiates it.

torch decomposes it before that, so its gradient is one scatter per corner: a training step of the
op takes 0.8 to 3.5 times as long as in eager (f32, one core). The forward half is decomposed later.
GPUs keep the scatters, with 0.02 to 0.8 of eager's time (H100). So do symbolic sizes: fake tensors
have no rule for ATen's gradient op with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decompositions

sizes_of: Any = decompositions.upsample_compute_output_size
CPU = DispatchKey.AutogradCPU
NAMES = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d",
)  # fmt: skip


@contextmanager
def upsampling() -> Iterator[None]:
    """Let autograd see the ops of `NAMES` on CPUs, where it would see their decompositions."""
    packets = [getattr(torch.ops.aten, name) for name in NAMES]
    try:
        for p in packets:
            p.vec.py_impl(CPU)(_differentiated(p))
        yield
    finally:
        for p in packets:
            p.vec.py_kernels.pop(CPU, None)
            p.vec._dispatch_cache.clear()


def _differentiated(op: Any) -> Callable[..., Any]:
    """The overload `vec` of an op, which takes sizes or factors, by ATen's autograd."""
    in_parts = op.vec.py_kernels[DispatchKey.CompositeImplicitAutograd]

    def vec(*args: Any) -> Any:
        x, sizes, *corners, factors = args
        # torch's fake kernel fails for an empty batch (docs/upstream/torch_empty_upsampling.py).
        if not all(isinstance(n, int) and n for n in x.shape):
            return in_parts(*args)
        sizes = sizes_of(x.shape, sizes, factors)
        scales = factors or [None] * len(sizes)
        return op.default._op_dk(DispatchKey.Autograd, x, sizes, *corners, *scales)

    return vec
