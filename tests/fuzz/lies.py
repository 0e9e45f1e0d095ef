"""Custom ops whose results have other strides, or another address, than their fake kernels tell.

Each gives what it was given; its fake kernel tells of a contiguous tensor. Eager goes on with what
the real kernel gave. A compiled graph goes on with the same values in the layout that was told, so
that it gives what eager gives where the ops are `honest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["OPS", "honest"]

_honest = [False]


@contextmanager
def honest() -> Iterator[None]:
    """In here all ops give the layout that their fake kernels tell."""
    before, _honest[0] = _honest[0], True
    try:
        yield
    finally:
        _honest[0] = before


def turned(x: Tensor) -> Tensor:
    """The first dimension is the innermost."""
    order = range(x.dim())[::-1]
    return x.permute(*order).clone(memory_format=torch.contiguous_format).permute(*order)


def padded(x: Tensor) -> Tensor:
    """Rows have three elements behind them that are nobody's."""
    wide = x.new_empty((*x.shape[:-1], x.shape[-1] + 3))
    return wide[..., : x.shape[-1]].copy_(x)


def shifted(x: Tensor) -> Tensor:
    """One element further than an aligned address."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def _defined(real: Callable[[Tensor], Tensor]) -> Any:
    def told(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def given(x: Tensor) -> Tensor:
        return told(x).copy_(x) if _honest[0] else real(x)

    op = torch.library.custom_op(f"fuzz::{real.__name__}", given, mutates_args=())
    op.register_fake(told)
    op.register_autograd(lambda ctx, grad: grad.clone())
    return op


OPS = [_defined(f) for f in (turned, padded, shifted)]
