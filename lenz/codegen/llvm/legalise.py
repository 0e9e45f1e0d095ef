"""Ops in LLVM: which have a direct form."""

from __future__ import annotations

from lenz.codegen.legalise import legalise_kernel, types_of
from lenz.ir.expr import Expr
from lenz.ir.kernel import Kernel
from lenz.ir.op import CONST, INDEX, LOAD, MASKED, REF

_STRUCTURAL = (CONST, LOAD, INDEX, REF, MASKED)


def legalise(k: Kernel) -> Kernel:
    """The same kernel over ops that have an `llvm` form; InternalError for an op without any."""
    return legalise_kernel(k, is_legal, lambda op: op.expand, "LLVM")


def is_legal(e: Expr) -> bool:
    """True when the node can be emitted as it is."""
    if e.op in _STRUCTURAL:
        return True
    if e.op.llvm is None:
        return False
    return e.op.native is None or all(d in e.op.native for d in types_of(e))
