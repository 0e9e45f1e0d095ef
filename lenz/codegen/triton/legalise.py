"""Ops in Triton: which have a direct form, and what the others are made of."""

from __future__ import annotations

from lenz.codegen.legalise import legalise_kernel
from lenz.ir.expr import Expr
from lenz.ir.kernel import Kernel
from lenz.ir.op import CONST, INDEX, LOAD, MASKED, REF

_STRUCTURAL = (CONST, LOAD, INDEX, REF, MASKED)


def legalise(k: Kernel) -> Kernel:
    """The same kernel over ops that have a Triton form; InternalError for an op without any."""
    return legalise_kernel(k, is_legal, lambda op: op.expand_gpu or op.expand, "Triton")


def is_legal(e: Expr) -> bool:
    """True when the node can be emitted as it is."""
    if e.op in _STRUCTURAL:
        return True
    if e.op.triton is None:
        return False
    native = e.op.triton_native
    return native is None or all(a.dtype in native for a in e.args)
