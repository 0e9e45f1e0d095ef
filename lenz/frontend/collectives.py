"""A collective stays even if nobody reads its result: other processes take part in it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import torch.fx.node
from torch.fx import Node

from lenz.frontend.values import added

SPACES = ("_c10d_functional", "c10d_functional", "_dtensor")


def is_collective(n: Node) -> bool:
    """Say whether a call may be a collective, or wait for one."""
    return getattr(n.target, "namespace", "") in SPACES


@cache
def collectives() -> frozenset[Any]:
    """Return all of torch's; 15 ms."""
    names = [n.split("::") for n in torch._C._dispatch_get_all_op_names()]
    packets = (getattr(getattr(torch.ops, s), op.split(".")[0]) for s, op in names if s in SPACES)
    return frozenset(getattr(p, overload) for p in packets for overload in p.overloads())


def none_dropped() -> AbstractContextManager[None]:
    """Keep torch from dropping collectives in this context.

    Only for a time: differentiating graphs in parts may drop and repeat them.
    """
    is_used = torch.distributed.is_available() and torch.distributed.is_initialized()
    return added(collectives() if is_used else set(), torch.fx.node._side_effectful_functions)
