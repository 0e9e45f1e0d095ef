"""Fake tensors refuse to resize an empty batch of images, and eager resizes it (torch 2.13).

The check in the fake kernels is `input.numel() != 0 or multiply_integers(input.size()[1:])`: an int
if the batch is empty, and `torch._check` takes bools only.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

x = torch.randn(0, 1, 4)
print("eager:", torch.ops.aten.upsample_nearest1d(x, [8]).shape)
with FakeTensorMode() as mode:
    try:
        print("fake:", torch.ops.aten.upsample_nearest1d(mode.from_tensor(x), [8]).shape)
    except TypeError as e:
        print("fake:", e)
