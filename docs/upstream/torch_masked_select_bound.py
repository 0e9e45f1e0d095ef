"""The most elements that `masked_select` may give, with a mask of more dimensions (torch 2.13).

Fake tensors bound it by the elements of the input, but the input is broadcast to the mask: the
assertion in the graph fails for a call that is right in eager. It prints nothing when all is well.
"""

from __future__ import annotations

import torch

torch._dynamo.config.capture_dynamic_output_shape_ops = True
x, mask = torch.arange(4.0), torch.ones(3, 4, dtype=torch.bool)
try:
    got = torch.compile(torch.masked_select, backend="aot_eager", fullgraph=True)(x, mask)
    if got.shape != (12,):
        print(f"masked_select gives {got.shape}")
except RuntimeError as e:
    print(f"masked_select of a mask with more dimensions: {e}")
