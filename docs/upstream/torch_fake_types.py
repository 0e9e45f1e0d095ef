"""Results whose type torch 2.13 tells wrong: each line shows an op, eager's types and those told.

Operands are of two types. It prints nothing when all is well.
"""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

aten = torch.ops.aten
half, wide = torch.randn(4, 6).bfloat16(), torch.randn(4, 6, dtype=torch.float64)
w, b = torch.randn(6), torch.randn(6)
CALLS = {
    "huber_loss": (lambda x, y: aten.huber_loss(x, y), (half, wide)),
    "soft_margin_loss": (lambda x, y: aten.soft_margin_loss(x, y), (half, wide)),
    "normal": (lambda x, y: aten.normal.Tensor_Tensor(x, y), (half, wide.abs())),
    "layer norm": (lambda x, w, b: aten.native_layer_norm(x, [6], w, b, 1e-5), (half, w, b)),
    "batch norm": (
        lambda x, w, b: aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5),
        (half, w, b),
    ),
}


def types(results: object) -> list[torch.dtype]:
    values = results if isinstance(results, (tuple, list)) else [results]
    return [t.dtype for t in values]


for name, (call, args) in CALLS.items():
    eager = types(call(*args))
    with FakeTensorMode() as mode:
        told = types(call(*(mode.from_tensor(a) for a in args)))
    if eager != told:
        print(f"{name}: eager gives {eager}, fake tensors tell {told}")
