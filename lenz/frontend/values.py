"""Questions about fake tensors that never add a guard to ShapeEnv."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

HALVES = (torch.float16, torch.bfloat16)


def widened(x: torch.Tensor) -> torch.Tensor:
    """Return half types as float32, in which lenz computes them; other types as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@contextmanager
def unguarded(mode: FakeTensorMode) -> Iterator[None]:
    """Run calls on fake tensors as AOTAutograd does, but without guards on their sizes.

    Some kernels of composite ops take no symbols; their Python decompositions do.
    """
    if mode.shape_env is None:
        with mode:
            yield
        return
    with mode, mode.shape_env.suppress_guards(), enable_python_dispatcher():
        yield


@contextmanager
def added(more: Set[Any], to: set[Any]) -> Iterator[None]:
    """Add elements to a set of torch's in this context."""
    new = more - to
    to |= new
    try:
        yield
    finally:
        to -= new


def has_fakes(values: Sequence[Any]) -> bool:
    """Say whether values include the caller's own fake tensors: not of the tracing mode."""
    context = TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    leaves = tree_leaves(list(values))
    return any(isinstance(v, FakeTensor) and v.fake_mode is not mode for v in leaves)


def storage_of(value: Any) -> int | None:
    """Return a key of a (fake) tensor's storage; None for sparse, nested, non-tensors."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # sparse, nested and opaque tensors have no single storage


def hint_of(n: Any) -> Any:
    """Return the value that a symbol had when it was traced; a number is its own."""
    return n.node.hint if isinstance(n, torch.SymInt) else n


def is_same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Say whether two sizes are equal as expressions, without a guard: False means "unknown".

    A symbol that was specialised equals its number, though it may still be a SymInt.
    """
    p, q = (n.node.expr if isinstance(n, torch.SymInt) else n for n in (a, b))
    return bool(p == q)


def are_same(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    return len(a) == len(b) and all(is_same_size(x, y) for x, y in zip(a, b, strict=True))


def dense_order(shape: Sequence[Any], stride: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the dimensions, outermost in memory first; None if there are gaps or unknowns."""
    rest, order, step = list(range(len(shape))), list[int](), 1
    while fits := [d for d in rest if is_same_size(stride[d], step)]:
        d = max(fits, key=lambda d: (is_same_size(shape[d], 1), d))
        rest.remove(d)
        order.insert(0, d)
        step = step * shape[d]
    return (*rest, *order) if all(is_same_size(shape[d], 1) for d in rest) else None


def is_same_layout(a: Any, b: Any, *, offset: bool) -> bool:
    """Say whether two dense fake tensors agree in dtype, device, shape, strides (and offset)."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    x, y = ((type(t), t.dtype, t.device, t.layout, t.is_conj(), t.is_neg()) for t in (a, b))
    if x != y or a.layout != torch.strided:
        return False
    if offset and not is_same_size(a.storage_offset(), b.storage_offset()):
        return False
    return are_same(a.shape, b.shape) and are_same(a.stride(), b.stride())
