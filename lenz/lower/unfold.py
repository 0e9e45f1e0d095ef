"""Windows of images as columns of a matrix, and back: unfold and fold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from lenz import ops
from lenz.ir.dtype import compute_dtype
from lenz.ir.expr import Expr, const, index, masked
from lenz.lower.builder import Decline, GraphBuilder, Index, Value
from lenz.lower.registry import lowering
from lenz.lower.view import regroup
from lenz.lower.windows import WRITTEN_OUT, Windows
from lenz.sym import ZERO, Int, Sym, sym


def _windows(
    sizes: Sequence[Sym | int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Windows:
    k, s, p, d = [tuple(v) * (2 // len(v)) for v in (kernel, stride, padding, dilation)]
    size = tuple(sym(n) for n in sizes)
    outs = tuple((n + 2 * p[a] - d[a] * (k[a] - 1) - 1) // s[a] + 1 for a, n in enumerate(size))
    return Windows(k, s, p, d, size, outs, False)


@lowering("im2col")
def im2col(b: GraphBuilder, x: Value, *window: Sequence[int]) -> Value:
    """out[.., (c, a), o] = x[.., c, o stride - padding + a dilation], 0 outside."""
    w = _windows(x.shape[-2:], *window)
    lead = x.shape[:-2]

    def tap(i: Index) -> Expr:
        at, a, o = i[: len(lead)], i[len(lead) : len(lead) + 2], i[len(lead) + 2 :]
        return w.read(lambda place: x.at((*at, *place)), o, a, const(0, x.dtype))

    shape = (*lead, *(Int(k) for k in w.kernel), *w.outs)
    return b.view(b.map(tap, b.temp(shape, x.dtype)), regroup(b.result.shape, shape))


@lowering("col2im")
def col2im(
    b: GraphBuilder, x: Value, output_size: Sequence[Sym | int], *window: Sequence[int]
) -> Value:
    """The adjoint of `im2col`: sums the entries that come from each element."""
    w = _windows(output_size, *window)
    if ZERO in x.shape:
        return b.map(lambda i: const(0, x.dtype))
    if w.area > WRITTEN_OUT and w.stride != w.kernel:
        raise Decline("a sum over many windows")
    lead = (*x.shape[:-2], b.result.shape[-3])[-(b.result.rank - 2) :]
    shape = (*lead, *(Int(k) for k in w.kernel), *w.outs)
    columns = b.view(x, regroup(shape, x.shape), b.temp(shape, x.dtype))

    def at(i: Index) -> Expr:
        total: Expr = const(0, compute_dtype(x.dtype))
        for o, a, there in _takers(w, i[-2:]):
            total = total + masked(there, columns.compute((*i[:-2], *a, *o)), const(0, total.dtype))
        return total

    return b.map(at)


def _takers(w: Windows, h: Index) -> list[tuple[Index, Index, Expr]]:
    """The windows that may contain a position, the place in each, and the condition for it."""
    if all(d == 1 for d in w.dilation):
        return [
            (o, tuple(h[d] + w.padding[d] - o[d] * w.stride[d] for d in range(2)), there)
            for o, there in w.holders(h)
        ]
    found: list[tuple[Index, Index, Expr]] = []
    for a in w.offsets():
        ahead = [h[d] + w.padding[d] - a[d] * w.dilation[d] for d in range(2)]
        o = tuple(v // w.stride[d] for d, v in enumerate(ahead))
        there = [ops.eq(index(v % s), index(ZERO)) for v, s in zip(ahead, w.stride, strict=True)]
        there += [index(v) >= index(ZERO) for v in o]
        there += [index(v) < index(n) for v, n in zip(o, w.outs, strict=True)]
        found.append((o, a, reduce(ops.and_, there)))
    return found
