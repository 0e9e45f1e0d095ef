"""Two arguments that overlap at one distance, then at another; prints what differs.

AOTAutograd traces them as views of one memory and keeps their distance, but does not guard it.
torch 2.13 prints [4.0, 8.0, 8.0, 11.0] for two halves of the memory; eager gives
[4.0, 7.0, 10.0, 13.0].
"""

from __future__ import annotations

import torch


def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Write to one argument, then read both."""
    x.mul_(2)
    return x + y


if __name__ == "__main__":
    for backend in ("eager", "aot_eager"):
        run = torch.compile(f, backend=backend)
        memory = torch.arange(8.0)
        run(memory[:4], memory[2:6])
        memory = torch.arange(8.0)
        print(backend, run(memory[:4], memory[4:]).tolist())
