"""Which ops have a direct form in Triton, and how the others expand."""

from __future__ import annotations

from lenz.ir.dtype import FLOAT8
from lenz.ir.expr import Expr
from lenz.ir.kernel import Kernel
from lenz.ir.op import CONST, INDEX, LOAD, MASKED, REF
from lenz.machine.cuda.triton.lanes import widths_of
from lenz.machine.cuda.triton.random import pairs_of
from lenz.machine.legalise import legalise_kernel, types_of

CONVERTS_FLOAT8 = 89  # compute capability 8.9 has instructions for them
_STRUCTURAL = (CONST, LOAD, INDEX, REF, MASKED)


def legalise(k: Kernel, arch: int) -> Kernel:
    """The same kernel over ops that have a Triton form; InternalError for an op without one."""
    gpu = lambda op: op.expand_gpu or op.expand
    pairs = pairs_of(widths_of(k))

    def legal(e: Expr) -> bool:
        return is_legal(e, arch) or (pairs is not None and pairs.counters(e) is not None)

    return legalise_kernel(k, legal, gpu, "Triton")


def is_legal(e: Expr, arch: int) -> bool:
    """True if the node can be emitted as it is for compute capability `arch` (90: 9.0)."""
    if e.op in _STRUCTURAL:
        return True
    if e.op.triton is None:
        return False
    native = e.op.triton_native
    if native is not None and arch >= CONVERTS_FLOAT8:
        native += FLOAT8
    return native is None or all(d in native for d in types_of(e))
