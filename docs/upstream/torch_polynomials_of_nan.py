"""Orthogonal polynomials of NaN are memory that nobody has written (torch 2.13, CPU).

The recurrence `for k in 2..n, while the last value is no NaN` does not run if the first value is
NaN, and its result is declared without a value. It prints nothing when all is well.
"""

from __future__ import annotations

import torch

NAMES = [n for n in dir(torch.special) if "_polynomial_" in n and n[0] != "_"]

for name in NAMES:
    torch.arange(1.0, 1e5).sin()  # leaves other numbers in registers and on the stack
    found = getattr(torch.special, name)(torch.full((3,), float("nan")), 7)
    if not bool(found.isnan().all()):
        print(f"{name}(nan, 7) is {found[0].item()}")
