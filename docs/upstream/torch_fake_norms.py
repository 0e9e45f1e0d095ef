"""Sizes that torch 2.11 tells wrong: a norm over dimensions of one, which are counted from the end.

`torch._refs.linalg.vector_norm` keeps the sizes `for d in range(rank) if d not in dim`, and -1 is
no such d: nothing is reduced. It prints nothing when all is well.
"""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

for shape, dim in (((1, 1), (-1,)), ((3, 1), (-1,)), ((1,), (-1,)), ((1, 1), (0, -1))):
    x = torch.ones(shape)
    eager = torch.linalg.vector_norm(x, 2, dim).shape
    with FakeTensorMode() as mode:
        told = torch.linalg.vector_norm(mode.from_tensor(x), 2, dim).shape
    if eager != told:
        print(f"{shape} over {dim}: eager gives {tuple(eager)}, fake tensors tell {tuple(told)}")
