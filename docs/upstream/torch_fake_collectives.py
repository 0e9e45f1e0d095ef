"""Collectives whose fake tensors have other strides than the real ones; prints each that differs.

A transposed matrix is given; the real results are contiguous, the fake ones are transposed. torch
2.11 and 2.13 print both.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops._c10d_functional

if __name__ == "__main__":
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    x = torch.randn(6, 4).t()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    for name, call in (
        ("broadcast", lambda t: ops.broadcast(t, 0, "0")),
        ("all_reduce_coalesced", lambda t: ops.all_reduce_coalesced([t], "sum", "0")[0]),
    ):
        real = ops.wait_tensor(call(x))
        with mode:
            told = call(fake)
        if real.stride() != told.stride():
            print(f"{name}: told {told.stride()}, is {real.stride()}")
    dist.destroy_process_group()
