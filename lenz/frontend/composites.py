"""Ops that torch decomposes before autograd, where its decomposition is not what eager does.

y = F.dropout(x, training=False)   ==>   y is x, not a copy

While a graph is captured, they are replaced; `upsampling.py` has the ops that interpolate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import decompositions
from torch.fx.experimental.symbolic_shapes import guard_or_false

from lenz.frontend.upsampling import NAMES, differentiated

aten = torch.ops.aten
KEYS = DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA


@contextmanager
def composites() -> Iterator[None]:
    """Let autograd see these ops as eager computes them."""
    rules = {getattr(aten, s).vec: differentiated(getattr(aten, s).default) for s in NAMES} | {
        aten.dropout.default: dropout,
        aten._pad_circular.default: circular_pad,
        aten.multi_margin_loss.default: multi_margin_loss,
        aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
    }
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


def circular_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    """A border that continues on the other side: joins, where torch copies part by part."""
    if not all(guard_or_false(p >= 0) for p in padding):
        return aten._pad_circular.default.decompose(x, padding)  # type: ignore[no-any-return]  # torch's
    for d, low, high in zip(range(-1, -x.dim(), -1), padding[::2], padding[1::2], strict=False):
        x = torch.cat([x.narrow(d, x.shape[d] - low, low), x, x.narrow(d, 0, high)], d)
    return x.contiguous()


def multi_margin_loss(x: Tensor, target: Tensor, *rest: Any) -> Tensor:
    """A scalar for a target without dimensions; torch's decomposition gives it one."""
    loss: Tensor = decompositions.multi_margin_loss(x, target, *rest)
    return loss if target.dim() else loss.sum()


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The loss of x [N, C] or [C], and which of its places are labels.

    torch's decomposition also adds the places of `target` from the first -1 on, which are no
    labels: docs/upstream/torch_multilabel_margin.py.
    """
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)  # type: ignore[no-untyped-call]  # torch's
    n = rows.shape[1]
    places = torch.arange(n, device=x.device)
    is_label = places < torch.where(labels == -1, places, n).amin(-1, keepdim=True)
    chosen = torch.where(is_label, labels, 0)
    is_target = ((chosen[..., None] == places) & is_label[..., None]).any(1)
    margins = 1 - rows.gather(1, chosen)[..., None] + rows[:, None]
    counts = is_label[..., None] & ~is_target[:, None] & (margins > 0)  # NaN does not, as in ATen
    loss = torch.where(counts, margins / n, 0).sum((1, 2))
    if reduction or x.dim() < 2:
        loss = loss.mean() if reduction == 1 else loss.sum()
    return loss, is_target.to(x.dtype).reshape(target.shape)
