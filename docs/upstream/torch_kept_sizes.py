"""Interpolation by a factor that changes no size, or doubles it, on CPUs (torch 2.13).

ATen ignores the factor of such a dimension in `nearest` and linear modes (an index stays as it is,
or is halved); torch's decompositions use it, so `aot_eager` returns other numbers. In `bicubic`
mode ATen uses it, but copies the gradient as if it did not. It prints nothing when all is well.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

x = torch.arange(12.0, dtype=torch.float64).view(1, 1, 3, 4).requires_grad_()
for mode, factor in (("nearest", 1.1), ("nearest", 2.1), ("bilinear", 1.1)):
    fn = partial(F.interpolate, scale_factor=factor, mode=mode)
    difference = (torch.compile(fn, backend="aot_eager")(x) - fn(x)).abs().max().item()
    if difference > 1e-9:
        print(f"{mode} by {factor}: decomposed, it differs by up to {difference:.2f}")
if not torch.autograd.gradcheck(
    lambda x: F.interpolate(x, scale_factor=1.1, mode="bicubic"), x, raise_exception=False
):
    print("bicubic by 1.1: the gradient is not that of the result")
