"""Reductions, scans and updates on torch tensors, shared by both interpreters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lenz.errors import InternalError
from lenz.ir.dtype import I64, DType
from lenz.ir.graph import ReduceKind, ScanKind, UpdateMode, identity_of

_WIDE = {torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64}


def reduce_last(kind: ReduceKind, x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Reduce the last dimension; an empty one gives the identity (an error for a position)."""
    if x.shape[-1] == 0:
        if kind in ("argmax", "argmin"):
            raise InternalError(f"{kind} over no elements", rule="reduce-empty")
        return torch.full(x.shape[:-1], identity_of(kind, dtype), dtype=dtype.torch)
    if kind in ("argmax", "argmin"):
        return arg_last(kind, x)[1]
    if kind in ("max", "min"):
        return arg_last("argmax" if kind == "max" else "argmin", x)[0]
    return _REDUCTIONS[kind](x.to(_WIDE.get(x.dtype, x.dtype))).to(dtype.torch)


_REDUCTIONS: Mapping[ReduceKind, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: torch.sum(x, -1, dtype=x.dtype),
    "prod": lambda x: torch.prod(x, -1, dtype=x.dtype),
    "any": lambda x: torch.any(x, -1),
    "all": lambda x: torch.all(x, -1),
}
_SCANS: Mapping[ScanKind, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: _running_sums(x),
    "prod": lambda x: torch.cumprod(x, -1, dtype=x.dtype),
    "max": lambda x: torch.cummax(x, -1).values,
    "min": lambda x: torch.cummin(x, -1).values,
    "logaddexp": lambda x: torch.logcumsumexp(x, -1),
}


def _running_sums(x: torch.Tensor) -> torch.Tensor:
    """Like `cumsum`, but without its initial 0.0, which drops -0.0."""
    zeros = torch.cumprod((x == 0) & torch.signbit(x), -1).bool()
    return torch.where(zeros, x, torch.cumsum(x, -1, dtype=x.dtype))


_UPDATES = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def scan_last(kind: ScanKind, x: torch.Tensor) -> torch.Tensor:
    """Running values along the last dimension."""
    return _SCANS[kind](x)


def update(flat: torch.Tensor, at: torch.Tensor, value: torch.Tensor, mode: UpdateMode) -> None:
    """Write or combine elements of a 1-d tensor in place; repeated positions in order."""
    if mode == "add" and flat.dtype in (torch.bfloat16, torch.float16):  # rounds after each value
        flat.index_add_(0, at, value)
    elif mode != "set":
        flat.scatter_reduce_(0, at, value, _UPDATES[mode])
    elif torch.unique(at).numel() == at.numel():
        flat[at] = value
    else:
        for k in range(at.numel()):
            flat[at[k]] = value[k]


def arg_last(kind: ReduceKind, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The extremum over the last dimension (NaN wins), and its lowest position."""
    same = wide = x.to(_WIDE.get(x.dtype, x.dtype))
    if x.dtype is torch.uint64:
        wide = wide ^ torch.iinfo(torch.int64).min  # keeps the order of unsigned numbers
    best = torch.amax(wide, -1) if kind == "argmax" else torch.amin(wide, -1)
    hit = wide == best.unsqueeze(-1)
    if x.is_floating_point():
        hit = hit | torch.isnan(wide)
    far = torch.full((), x.shape[-1], dtype=I64.torch)
    position = torch.where(hit, torch.arange(x.shape[-1]), far).amin(-1)
    return torch.gather(same, -1, position.unsqueeze(-1)).squeeze(-1).to(x.dtype), position
