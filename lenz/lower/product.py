"""Products of matrices with few rows or columns, as loops that fuse with their readers.

    y[m, n] = x[m, 0] w[0, n] + x[m, 1] w[1, n] + ...

Libraries are made for large matrices: 1.2 million rows of 4 by 4 x 4 bf16 take 50 to 85 us on an
H200, whose memory could deliver them in 6. 200,000 rows of 3 by 3 x 64 f32 take 29 ms on one core,
as a loop 8.
"""

from __future__ import annotations

from typing import Any

from lenz import ops
from lenz.ir.dtype import F32, F64, compute_dtype
from lenz.ir.expr import Expr
from lenz.ir.tensor import TensorType
from lenz.lower.builder import Decline, GraphBuilder, Index, Value
from lenz.lower.reduce import scaled_sum
from lenz.lower.registry import lowering
from lenz.machines import runs_programs
from lenz.sym import Int, Sym, product, prove_lt

TINY = 4  # the most terms of a sum that is written out
FEW = 8  # the same for a few columns on a GPU; the most rows and columns of a sum over long rows
# The same for as few as 4 rows or columns on a CPU: 3 x 200,000 by 200,000 x 64 f32 take 3.9 ms, in
# a library 11.9. With 256 columns they take 98, in a library 26.
WIDE = 64
LEAST = 4096  # the fewest multiplications: a shorter product takes no time worth a kernel


@lowering("mm.default", "bmm.default")
def plain(b: GraphBuilder, x: Value, y: Value) -> Value:
    """The product of two matrices, or of each pair."""
    return _product(b, x, y, b.result)


@lowering("addmm.default", "baddbmm.default")
def added(b: GraphBuilder, c: Value, x: Value, y: Value, **scales: Any) -> Value:
    """beta c + alpha x y; with beta = 0, NaN in c is ignored."""
    sums = _product(b, x, y, b.temp(b.result.shape, compute_dtype(b.result.dtype)))
    return scaled_sum(b, c, sums, **scales)


def _product(b: GraphBuilder, x: Value, y: Value, type: TensorType) -> Value:
    (*_, m, n), k = type.shape, x.shape[-1]

    def term(i: Index, r: Sym) -> tuple[Expr, Expr]:
        return x.compute((*i[:-1], r)), y.compute((*i[:-2], r, i[-1]))

    def written_out(i: Index) -> Expr:
        first, *rest = (term(i, Int(r)) for r in range(size[k]))
        total = ops.mul(*first)
        for factors in rest:
            total = ops.fma(*factors, total)
        return total

    size = {s: s.value if isinstance(s, Int) else WIDE + 1 for s in (m, n, k)}
    few, wide = (FEW, FEW) if runs_programs(x.device) else (TINY, WIDE)
    # On CPUs a library multiplies halves by instructions of their own.
    known = x.dtype in (F32, F64) or (x.dtype.is_half and runs_programs(x.device))
    if known and not prove_lt(product((*type.shape, k)), LEAST):
        if size[k] <= TINY or max(size[k], size[n]) <= few:
            return b.map(written_out, type)
        if min(size[m], size[n]) <= few and max(size[m], size[n]) <= wide:
            return b.reduce("sum", type.shape, (k,), lambda i, r: ops.mul(*term(i, *r)), type=type)
    raise Decline("a library multiplies large matrices")
