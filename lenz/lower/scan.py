"""Running sums, products and extrema along one dimension.

Halves are accumulated in f32 and rounded once per element; sums and products of integers are i64
unless `dtype` says otherwise.
"""

from __future__ import annotations

from lenz import ops
from lenz.ir.dtype import BOOL, I32, I64, U8, DType
from lenz.ir.expr import Expr, const, index
from lenz.ir.graph import ScanKind
from lenz.lower.builder import Decline, GraphBuilder, Index, Value
from lenz.lower.dims import wrapped
from lenz.lower.reduce import element
from lenz.lower.registry import lowering
from lenz.sym import ONE, Sym


def _scan(b: GraphBuilder, kind: ScanKind, x: Value, dim: int) -> Value | Decline:
    to = b.result.dtype
    if to is BOOL:
        return Decline("a running sum of truth values")
    d = wrapped(dim, x.rank)
    if x.rank == 0 or x.shape[d] is ONE:
        return b.map(lambda i: element(x, i, to))
    return b.scan(kind, d, lambda i: element(x, i, to))


# Of the elements up to each one: the sum, the product, log of the sum of the exponentials.
lowering("cumsum")(lambda b, x, dim, **_: _scan(b, "sum", x, dim))
lowering("cumprod")(lambda b, x, dim, **_: _scan(b, "prod", x, dim))
lowering("logcumsumexp")(lambda b, x, dim: _scan(b, "logaddexp", x, dim))


def _extremum(b: GraphBuilder, kind: ScanKind, x: Value, dim: int) -> tuple[Value, Value]:
    """The extreme value up to each element, and the last position that has it.

    An element that equals the extreme value up to itself is its newest position, so the position is
    the greatest such number so far. NaN is the extreme value from its first occurrence on, and the
    position is that of the last NaN.
    """
    d = wrapped(dim, x.rank)
    values, positions = b.results
    if x.rank == 0 or x.shape[d] is ONE:
        return b.map(x.at, values), b.map(lambda i: const(0, I64), positions)

    def at(i: Index) -> Expr:
        return ops.cast(x.at(i), U8) if x.dtype is BOOL else x.compute(i)

    best = b.scan(kind, d, at, values)

    def newest(i: Index) -> Expr:
        e, high = x.compute(i), best.compute(i)
        hit = ops.or_(ops.eq(e, high), ops.isnan(e))
        to = _position_type(x.shape[d])
        return ops.where(hit, index(i[d], to), const(0, to))

    return best, b.scan("max", d, newest, positions, f"{best.name}_at")


def _position_type(size: Sym) -> DType:
    return I32 if size.hi is not None and size.hi < 2**31 else I64


lowering("cummax")(lambda b, x, dim: _extremum(b, "max", x, dim))
lowering("cummin")(lambda b, x, dim: _extremum(b, "min", x, dim))
