"""Dropout that drops nothing (torch 2.13).

Eager returns the argument itself; torch's decomposition, and so `aot_eager`, a copy of it: a write
to the result no longer shows in the argument. It prints nothing when all is well.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

x = torch.ones(3)
y = torch.compile(lambda x: F.dropout(x, 0.5, training=False), backend="aot_eager")(x)
if y is not x:
    print("dropout in evaluation: a copy")
