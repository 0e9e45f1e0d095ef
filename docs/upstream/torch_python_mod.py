"""A sum of a tensor and n % 2**31 / 2**31 of a dynamic integer that fails in tracing (torch 2.13).

AOTAutograd computes such numbers as tensors (`tensorify_python_scalars`). Its table has no entry
for Python's remainder: AttributeError: 'TensorReferenceAnalysis' has no attribute 'python_mod'.
It prints nothing when all is well.
"""

from __future__ import annotations

import torch
from torch._dynamo.exc import BackendCompilerFailed


def fn(x: torch.Tensor, n: int) -> torch.Tensor:
    return x + (n * 5 + 1) % 2**31 / 2**31


try:
    for n in (2, 5):
        torch.compile(fn, backend="aot_eager")(torch.ones(1), n)
except BackendCompilerFailed as e:
    print(str(e).splitlines()[1])
