"""Running sums, products and extrema along one dimension.

As in eager, f32 is accumulated in f64 on CPUs: the running product of 10^7 numbers near 1 is off by
0.07 in f32. Halves are accumulated in f32, and all are rounded once per element. Sums and products
of integers are i64 unless `dtype` is given.
"""

from __future__ import annotations

from lenz import ops
from lenz.ir.dtype import BOOL, F32, F64, I32, I64, U8, compute_dtype
from lenz.ir.expr import Expr, const, index
from lenz.ir.graph import ScanKind
from lenz.lower.builder import Decline, GraphBuilder, Index, Value
from lenz.lower.dims import wrapped
from lenz.lower.reduce import converted
from lenz.lower.registry import lowering
from lenz.sym import ONE


def _scan(b: GraphBuilder, kind: ScanKind, x: Value, dim: int) -> Value:
    to = b.result.dtype
    if to is BOOL:
        raise Decline("a running sum of truth values")
    if x.rank == 0:
        return b.map(lambda i: converted(x, i, to))
    d = wrapped(dim, x.rank)
    wide = F64 if to is F32 and x.device == "cpu" else compute_dtype(to)
    # Eager starts with 0.0 or e^-inf, so that nothing is -0.0, except for a single GPU row.
    one_row = x.device != "cpu" and all(n is ONE for k, n in enumerate(x.shape) if k != d)

    def at(i: Index) -> Expr:
        e = ops.cast(converted(x, i, to), wide)
        return ops.of_one("sum", e) if kind != "prod" and not one_row else e

    return b.map(at) if x.shape[d] is ONE else b.scan(kind, d, at)


# Over the elements up to each one: the sum, the product, log of the sum of exponentials.
lowering("cumsum")(lambda b, x, dim, **_: _scan(b, "sum", x, dim))
lowering("cumprod")(lambda b, x, dim, **_: _scan(b, "prod", x, dim))
lowering("logcumsumexp")(lambda b, x, dim: _scan(b, "logaddexp", x, dim))


def _extremum(b: GraphBuilder, kind: ScanKind, x: Value, dim: int) -> tuple[Value, Value]:
    """The running extremum, and its last position so far.

    An element equal to the running extremum is its latest position, so the position is a running
    maximum of such positions. From the first NaN on the extremum is NaN, at the position of the
    last NaN.
    """
    d = wrapped(dim, x.rank)
    values, positions = b.results
    if x.rank == 0 or x.shape[d] is ONE:
        return b.map(x.at, values), b.map(lambda i: const(0, I64), positions)

    at = (lambda i: ops.cast(x.at(i), U8)) if x.dtype is BOOL else x.compute
    best = b.scan(kind, d, at, values)
    most = x.shape[d].hi
    to = I32 if most is not None and most < 2**31 else I64

    def newest(i: Index) -> Expr:
        e, high = x.compute(i), best.compute(i)
        return ops.where(ops.eq(e, high) | ops.isnan(e), index(i[d], to), 0)

    return best, b.scan("max", d, newest, positions, f"{best.name}_at")


lowering("cummax")(lambda b, x, dim: _extremum(b, "max", x, dim))
lowering("cummin")(lambda b, x, dim: _extremum(b, "min", x, dim))
