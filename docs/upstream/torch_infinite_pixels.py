"""Linear interpolation between two infinite pixels (torch 2.13).

ATen computes `a * (1 - w) + b * w`, torch's decomposition `a + (b - a) * w`: NaN if both are
infinite, and near a weight of 1 an error of the size of `a`. It prints nothing when all is well.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

fn = lambda x: F.interpolate(x, scale_factor=2, mode="linear")
x = torch.tensor([[[0.0, float("inf"), float("inf")]]])
got, want = torch.compile(fn, backend="aot_eager")(x), fn(x)
if not torch.allclose(got, want, equal_nan=True):
    print(f"{got.flatten().tolist()} instead of {want.flatten().tolist()}")
