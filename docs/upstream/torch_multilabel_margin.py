"""A loss of several labels per row with fewer labels than classes; prints what differs.

A row of the target holds its labels up to the first -1. torch 2.13 decomposes the loss before
autograd and adds the terms of the other places too, as if class 0 were a label there. It prints
1.6498 for the last row; eager gives 1.1214.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def f(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of each row."""
    return F.multilabel_margin_loss(x, target, reduction="none")


if __name__ == "__main__":
    torch.manual_seed(0)
    x, target = torch.randn(4, 3), torch.tensor([[0, 1, -1]] * 4)
    for backend in ("eager", "aot_eager"):
        print(backend, torch.compile(f, backend=backend)(x, target).tolist())
