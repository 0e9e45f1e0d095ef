"""Two arguments that share an element, which AOTAutograd takes to be apart; prints what differs.

`rows` has elements 0 and 2 of the memory, `last` has element 2. A write to one has to show in the
other. torch 2.13 prints 4.0 for the second row of `rows + 1`; eager gives 32.0.
"""

from __future__ import annotations

import torch


def f(rows: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Write to one argument, then read the other."""
    last.mul_(10)
    last.add_(1)
    return rows + 1


if __name__ == "__main__":
    for backend in ("eager", "aot_eager"):
        rows = torch.arange(1.0, 4.0).reshape(3, 1)[::2]
        made = torch.compile(f, backend=backend)(rows, rows[1:])
        print(backend, made.flatten().tolist())
