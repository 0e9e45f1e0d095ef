"""Tensors made from nothing: constants, ranges, identity. Every call returns fresh memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from lenz import ops
from lenz.ir.dtype import F32, F64, I64, DType, compute_dtype
from lenz.ir.expr import Expr, const, index
from lenz.lower.builder import GraphBuilder, Index, Value
from lenz.lower.operand import Number, Operand, exact, number
from lenz.lower.registry import lowering
from lenz.sym import ONE, Sym, sym


def _fill(b: GraphBuilder, value: Operand) -> Value:
    return b.map(lambda i: exact(value, i, b.result.dtype))


_shaped = partial(lowering, float8=True)
_shaped("full", "full_like")(lambda b, shape, value, **_: _fill(b, value))
_shaped("new_full")(lambda b, x, size, value, **_: _fill(b, value))
_shaped("scalar_tensor")(lambda b, value, **_: _fill(b, value))
_shaped("ones", "ones_like", "new_ones")(lambda b, *_, **__: _fill(b, 1))


@_shaped("zeros", "zeros_like", "new_zeros", "zero", "_efficientzerotensor")
@_shaped("empty", "empty_like", "new_empty")
@_shaped("empty_strided", "new_empty_strided", "empty_permuted")
def zeros(b: GraphBuilder, *_: Any, **__: Any) -> Value:
    """Zeros; also for uninitialised tensors, since zeros are always safe to read."""
    return _fill(b, 0)


lowering("arange.default")(lambda b, end, **_: _range(b, 0, 1))
lowering("arange.start", "arange.start_step")(
    lambda b, start, end, step=1, **_: _range(b, start, step)
)
lowering("prims.iota")(lambda b, length, *, start, step, **_: _range(b, start, step))


def _range(b: GraphBuilder, start: Number, step: Number) -> Value:
    """start + k * step: exact for integers, in f64 for other numbers, then rounded once."""
    t = b.result.dtype
    first, by = _integer(start, t), _integer(step, t)
    if first is not None and by is not None:
        return b.map(lambda i: index(first + i[0] * by, compute_dtype(t)))

    def fn(i: Index) -> Expr:
        # Half types accumulate in f32 in eager, all others in f64.
        wide = F32 if t.is_half else F64
        return ops.cast(number(start, wide) + number(step, wide) * index(i[0], wide), t)

    return b.map(fn)


def _integer(x: Number, t: DType) -> Sym | None:
    """A start or step as an exact integer; in an integer range torch truncates it first."""
    if isinstance(x, Sym):
        return x
    if isinstance(x, float) and not x.is_integer() and not t.is_integer:
        return None
    return sym(int(x))


@lowering("linspace.default")
def linspace(b: GraphBuilder, start: Number, end: Number, steps: Any, **_: Any) -> Value:
    """`steps` numbers from start to end; the second half is counted back from the end.

    Integers are counted between the whole parts of the ends.
    """
    t = b.result.dtype
    n = b.result.shape[0]
    wide = F64 if t.is_integer else compute_dtype(t)
    ends = [int(x) if t.is_integer and isinstance(x, float) else x for x in (start, end)]
    first, last = (number(x, wide) for x in ends)
    if n is ONE:
        return b.map(lambda i: ops.cast(first, t))
    step = (last - first) / ops.cast(number(n - 1, I64), wide)

    def fn(i: Index) -> Expr:
        low = first + step * index(i[0], wide)
        high = last - step * index(n - 1 - i[0], wide)
        e = ops.where(index(i[0]) < index(n // 2), low, high)
        return ops.cast(e, t) if t.is_integer else e

    return b.map(fn)


@lowering("eye")
def eye(b: GraphBuilder, *_: Any, **__: Any) -> Value:
    """1 on the diagonal, else 0."""
    t = b.result.dtype
    return b.map(lambda i: ops.where(ops.eq(index(i[0]), index(i[1])), const(1, t), const(0, t)))
