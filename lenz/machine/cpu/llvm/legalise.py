"""Kernels over ops that have a direct form in LLVM."""

from __future__ import annotations

from dataclasses import replace

from lenz import ops
from lenz.ir.expr import Expr, load
from lenz.ir.kernel import Kernel, Store
from lenz.machine.legalise import is_direct, legalise_kernel
from lenz.machine.legalise import legal_expr as legal_for

MACHINE = "cpu"  # whose forms of ops are those of LLVM


def legalise(k: Kernel) -> Kernel:
    """The same kernel over ops that have an LLVM form, and without stores that update.

    store add(%y, [i], v)   ==>   store(%y, [i], add(load(%y, [i]), v))

    Raises InternalError for an op that has none.
    """
    return legalise_kernel(k, MACHINE, _is_legal, _set)


def _set(s: Store) -> Store:
    if s.mode == "set":
        return s
    old = load(s.buffer, (s.offset,), s.value.dtype, s.bound)
    return replace(s, value=ops.combine(s.mode, old, s.value), mode="set")


def legal_expr(e: Expr) -> Expr:
    """An expression over ops that have an LLVM form."""
    return legal_for(e, MACHINE, _is_legal, {})


def _is_legal(e: Expr) -> bool:
    return is_direct(e, MACHINE)
