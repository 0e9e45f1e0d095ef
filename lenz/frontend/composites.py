"""Ops that torch decomposes before autograd, where its decomposition is not what eager does.

y = F.dropout(x, training=False)   ==>   y is x, not a copy

While a graph is captured, they are replaced; `upsampling.py` has the ops that interpolate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.fx.experimental.symbolic_shapes import guard_or_false

from lenz.frontend.upsampling import NAMES, differentiated

aten = torch.ops.aten
KEYS = DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA


@contextmanager
def composites() -> Iterator[None]:
    """Let autograd see these ops as eager computes them."""
    packets = [getattr(aten, name) for name in NAMES]
    rules = {p.vec: differentiated(p.default) for p in packets} | {aten.dropout.default: dropout}
    try:
        for (op, rule), key in product(rules.items(), KEYS):
            op.py_impl(key)(rule)
        yield
    finally:
        for op, key in product(rules, KEYS):
            op.py_kernels.pop(key, None)
            op._dispatch_cache.clear()


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """`x` itself where nothing is dropped, as in ATen's `Dropout.cpp`."""
    is_kept = not train or p == 0 or guard_or_false(x.numel() == 0)
    return x if is_kept else aten.native_dropout.default(x, p, train)[0]
