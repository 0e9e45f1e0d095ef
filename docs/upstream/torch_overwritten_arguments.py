"""Gradients computed from an argument after the function has overwritten it.

torch's min-cut partitioner takes an argument for a saved value that costs nothing, recomputes
`b.float()` from it in the backward half, and does not see that `copy_` has written it by then. In
eager `b.float()` is saved. It prints nothing when all is well.
"""

from __future__ import annotations

import torch
from torch import Tensor


def f(x: Tensor, b: Tensor) -> Tensor:
    y = (b.float() * x).sum()
    b.add_(1)
    return y


found = []
for run in (f, torch.compile(f, backend="aot_eager")):
    x, b = torch.zeros(2048, 64, requires_grad=True), torch.ones(2048, 64, dtype=torch.bfloat16)
    run(x, b).backward()
    assert x.grad is not None
    found.append(x.grad[0, 0].item())
if found[0] != found[1]:
    print(f"eager's gradient is {found[0]}, compiled {found[1]}")
