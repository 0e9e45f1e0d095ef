"""Kernels over ops that have a direct form in Triton."""

from __future__ import annotations

from lenz.ir.dtype import FLOAT8
from lenz.ir.expr import Expr
from lenz.ir.kernel import Kernel
from lenz.machine.cuda.triton.lanes import widths_of
from lenz.machine.cuda.triton.random import pairs_of
from lenz.machine.legalise import is_direct, legalise_kernel

MACHINE = "cuda"  # whose forms of ops are those of Triton
CONVERTS_FLOAT8 = 89  # compute capability 8.9 has instructions for them


def legalise(k: Kernel, arch: int) -> Kernel:
    """The same kernel over ops that have a Triton form for compute capability `arch` (90: 9.0).

    Raises InternalError for an op without one.
    """
    pairs, more = pairs_of(widths_of(k)), FLOAT8 if arch >= CONVERTS_FLOAT8 else ()

    def legal(e: Expr) -> bool:
        return is_direct(e, MACHINE, more) or (pairs is not None and pairs.counters(e) is not None)

    return legalise_kernel(k, MACHINE, legal)
