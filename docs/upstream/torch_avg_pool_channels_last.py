"""The gradient of `avg_pool2d` with padding is wrong for channels last on GPUs (needs one)."""

import torch
import torch.nn.functional as F

x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
grads = []
for device in ("cpu", "cuda"):
    a = x.to(device, memory_format=torch.channels_last).requires_grad_()
    y = F.avg_pool2d(a, 3, stride=2, padding=1)
    seed = torch.arange(y.numel(), device=device, dtype=torch.float64).view(y.shape)
    grads.append(torch.autograd.grad(y, a, seed)[0].cpu())
print(torch.allclose(*grads))  # False with torch 2.11
