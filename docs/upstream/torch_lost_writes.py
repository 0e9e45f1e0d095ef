"""A write into a 0-d float64 argument on CPUs that is lost (torch 2.13).

torch gives each such argument a float symbol. AOTAutograd specialises symbols that it did not turn
into arithmetic of tensors, and restarts Dynamo. The second graph is without the calls whose result
is the argument and has no users (`remove_tensorify_specialized_graphargs`): a call without users
counts as one whose users are all `item()`. It prints nothing when all is well.
"""

from __future__ import annotations

import torch


def fn(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


x, y = torch.tensor([1.5, 2.0], dtype=torch.float64)
torch.compile(fn, backend="aot_eager")(x, y)
if x.item() != 3.5:
    print(f"1.5 + 2.0 is written as {x.item()}")
