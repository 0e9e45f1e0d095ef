"""Calls whose tensors hold more than their memory shows; they run in eager.

Within a level of forward-mode differentiation a tensor may have a tangent. Under torch's old vmap,
which `is_grads_batched` and `jacobian(vectorize=True)` use, a tensor is a batch and has no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import GlobalStateSource
from torch._guards import TracingContext
from torch.autograd import forward_ad

from lenz.ir.plan import Boxed

BATCHING = torch._C._dispatch_key_parse("VmapMode")


def is_batched() -> bool:
    """Say whether torch's old vmap is active. Dynamo guards the dispatch keys of arguments."""
    return torch._C._dispatch_tls_is_dispatch_key_included(BATCHING)


def inside_level() -> str:
    """Guard the level of forward-mode differentiation; return why this call must run in eager."""
    if (context := TracingContext.try_get()) is not None:
        guard = GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL)
        context.guards_context.dynamo_guards.add(guard)
    if forward_ad._current_level >= 0:
        return "a level of forward-mode differentiation is active"
    return "an argument is a batch of torch's old vmap" if is_batched() else ""


def unbatched(run: Boxed, eager: Callable[[], Boxed]) -> Boxed:
    """Return a backward half that runs `eager` under torch's old vmap."""

    def call(args: list[Any]) -> Sequence[Any]:
        return eager()(args) if is_batched() else run(args)

    return call
