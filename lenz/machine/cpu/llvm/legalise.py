"""Kernels over ops that have a direct form in LLVM."""

from __future__ import annotations

from dataclasses import replace

from lenz import ops
from lenz.ir.expr import load
from lenz.ir.kernel import Kernel, Store
from lenz.machine.legalise import legalise_kernel

MACHINE = "cpu"  # whose forms of ops are those of LLVM


def legalise(k: Kernel) -> Kernel:
    """The same kernel over ops that have an LLVM form, and without stores that update.

    store add(%y, [i], v)   ==>   store(%y, [i], add(load(%y, [i]), v))

    Raises InternalError for an op that has none.
    """
    return legalise_kernel(k, MACHINE, store=_set)


def _set(s: Store) -> Store:
    if s.mode == "set":
        return s
    old = load(s.buffer, (s.offset,), s.value.dtype, s.bound)
    return replace(s, value=ops.combine(s.mode, old, s.value), mode="set")
