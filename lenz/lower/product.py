"""Products of matrices with few terms, rows or columns, as loops that fuse with their readers.

    y[m, n] = x[m, 0] w[0, n] + x[m, 1] w[1, n] + ...

Libraries are made for large matrices: 1.2 million rows of 4 by 4 x 4 bf16 take 50 to 85 us on an
H200, whose memory could deliver them in 6. 20,000 rows of 3 by 3 x 64 f32 take 0.25 ms on one core,
as a loop 0.15; 200,000 rows take 28 ms and 8.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, Literal

from lenz import ops
from lenz.ir.dtype import BF16, F16, F32, F64, compute_dtype
from lenz.ir.expr import Expr
from lenz.ir.tensor import TensorType
from lenz.lower.builder import Decline, GraphBuilder, Index, Value
from lenz.lower.reduce import scaled_sum
from lenz.lower.registry import lowering
from lenz.machines import runs_programs
from lenz.sym import ONE, ZERO, Int, Sym, product, prove_lt

TINY = 4  # the most terms of a sum that is written out
FEW = 8  # the same for as few columns on a GPU; the most rows and columns of a sum over long rows
WIDE = 64  # the most columns on a CPU
LEAST = 4096  # the fewest multiplications: a shorter product takes no time worth a kernel


# The product of two matrices, or of each pair.
lowering("mm.default", "bmm.default")(lambda b, x, y: _product(b, x, y, b.result))


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
        first, rest = ops.mul(*term(i, ZERO)), map(Int, range(1, k.hi or 0))
        return reduce(lambda total, r: ops.fma(*term(i, r), total), rest, first)

    form = _form(x, y, m, n) if not prove_lt(product((*type.shape, k)), LEAST) else ""
    if form == "map":
        return b.map(written_out, type)
    if form == "reduce":
        return b.reduce("sum", type.shape, (k,), lambda i, r: ops.mul(*term(i, *r)), type=type)
    raise Decline("a library multiplies large matrices")


def _form(x: Value, y: Value, m: Sym, n: Sym) -> Literal["map", "reduce", ""]:
    """The loop for the m x n product of x and y. An unknown size counts as large."""
    rows, columns, terms = (getattr(s, "value", WIDE + 1) for s in (m, n, x.shape[-1]))
    if not runs_programs(y.device):  # CPUs multiply halves by instructions of their own
        is_row = y.buffer.type.layout.stride[-1] is ONE  # else a vector's numbers lie far apart
        fits = x.dtype in (F32, F64) and is_row and terms <= TINY and columns <= WIDE
        return "map" if fits else ""
    if x.dtype not in (F16, BF16, F32, F64):
        return ""
    if terms <= TINY or max(terms, columns) <= FEW:
        return "map"
    return "reduce" if max(rows, columns) <= FEW else ""
