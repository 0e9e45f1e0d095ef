"""Fake tensors of attention with dropout have their seed and offset on the GPU (needs one)."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

op = torch.ops.aten._scaled_dot_product_efficient_attention.default
q = torch.randn(1, 2, 16, 32, device="cuda")
with FakeTensorMode() as mode:
    f = mode.from_tensor(q)
    fake = op(f, f, f, None, True, 0.1)
real = op(q, q, q, None, True, 0.1)
print([t.device.type for t in fake])  # cuda, cuda, cuda, cuda
print([t.device.type for t in real])  # cuda, cuda, cpu, cpu with torch 2.11, unless it is captured
