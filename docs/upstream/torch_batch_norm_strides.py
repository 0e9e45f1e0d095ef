"""The gradient of batch norm is wrong for one image of some strides (torch 2.13, CPU).

One image whose channels lie together counts as channels last, whatever the stride of its only
batch. If the gradient of the result is contiguous and that stride is below the size of an image, or
the width is 1, `native_batch_norm_backward` reads the gradient in the wrong order. It prints
nothing when all is well.
"""

from __future__ import annotations

import torch

torch.manual_seed(0)
for size, stride in (((1, 16, 3, 8), (16, 1, 128, 16)), ((1, 16, 8, 1), (128, 1, 16, 1))):
    data, by = torch.randn(2, *size)
    found = []
    for x in (torch.empty_strided(size, stride).copy_(data), data.clone()):
        y = torch.nn.functional.batch_norm(x.requires_grad_(), None, None, training=True)
        found += torch.autograd.grad(y, x, by)
    if not torch.allclose(*found, atol=1e-4):
        print(f"{size} with strides {stride}: {(found[0] - found[1]).abs().max().item():.2f} off")
