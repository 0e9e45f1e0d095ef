"""Pooling over windows. Its gradients are gathers: an input element reads from each of its windows.

A small window is unrolled, so that the loop over outputs vectorises; a large one is a reduction.
Input positions outside the tensor are never read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from lenz import ops
from lenz.ir.dtype import I64, compute_dtype
from lenz.ir.expr import Expr, const, index, masked
from lenz.ir.graph import UpdateMode
from lenz.ir.tensor import Layout
from lenz.lower.builder import At, Decline, GraphBuilder, Index, Move, Term, Update, Value
from lenz.lower.index import checked, computed
from lenz.lower.reduce import full_rows
from lenz.lower.registry import lowering
from lenz.lower.windows import UNKNOWN, WRITTEN_OUT, Adaptive, Offsets, Windows, adaptive, windows
from lenz.machines import runs_programs
from lenz.sym import ONE, ZERO, Int, Sym, flatten, maximum, minimum

# Most elements of a window whose maximum is unrolled: 49 taps take 4 ms, in eager 17 ms. So is the
# mean of windows that overlap on GPUs: 49 taps take 37 us, as a reduction 261.
MOST_TAPS = 128


def counted(w: Windows, o: Index, include_pad: bool, override: int | None) -> Expr | int:
    """The divisor of a window's sum, as in eager; at least 1."""
    if override is not None:
        return override
    if isinstance(w, Adaptive):
        sizes = [end - start for start, end in (w.ends(v, d) for d, v in enumerate(o))]
        return index(reduce(Sym.__mul__, sizes))
    if not w.ceil and (include_pad or not any(w.padding)):
        return w.area
    n: Sym = ONE
    for d in range(w.rank):
        start = o[d] * w.stride[d] - w.padding[d]
        end = minimum(start + w.kernel[d], w.sizes[d] + w.padding[d])
        if not include_pad:
            start, end = maximum(start, ZERO), minimum(end, w.sizes[d])
        # With ceil_mode a window may lie in the right padding, without elements; its sum is 0.
        n = n * maximum(end - start, ONE)
    return index(n)


def averaged(e: Expr, by: Expr | int) -> Expr:
    """e / by in the type of e."""
    return e / (const(by, e.dtype) if isinstance(by, int) else ops.cast(by, e.dtype))


def _taps(x: Value, w: Windows, other: Expr) -> Callable[[Index, Offsets], Expr]:
    """The element at a place in the window of an element of the result, `other` outside of x."""
    lead = x.rank - w.rank
    return lambda i, a: w.read(lambda at: x.compute((*i[:lead], *at)), i[lead:], a, other)


def avg_pool(
    b: GraphBuilder, x: Value, w: Windows, include_pad: bool, override: int | None
) -> Value:
    """Mean of each window."""
    if not x.dtype.is_float:
        raise Decline("average pooling of integers")
    if override == 0:
        raise Decline("eager rejects a divisor of zero")
    tap, lead = _taps(x, w, const(0.0, compute_dtype(x.dtype))), x.rank - w.rank
    overlaps = runs_programs(x.device) and w.covering(0) > 1
    if w.area <= (MOST_TAPS if overlaps else WRITTEN_OUT):
        total: At = lambda i: ops.total([tap(i, a) for a in w.offsets()])
    else:
        wide = b.temp(b.result.shape, compute_dtype(x.dtype))
        total = b.reduce("sum", b.result.shape, w.over, tap, type=wide).at
    return b.map(lambda i: averaged(total(i), counted(w, i[lead:], include_pad, override)))


def _enter_avg(packet: str, rank: int) -> None:
    """Register avg_poolNd and its gradient."""

    @lowering(packet)
    def forward(b: GraphBuilder, x: Value, *given: Any) -> Value:
        default: tuple[Any, ...] = (None, (), 0, False, True, None)
        size, stride, padding, ceil, include_pad, override = (*given, *default[len(given) :])
        w = windows(x.shape[-rank:], b.result.shape[-rank:], size, stride, padding, 1, ceil)
        return avg_pool(b, x, w, include_pad, override)

    @lowering(f"{packet}_backward")
    def backward(b: GraphBuilder, grad: Value, x: Value, *as_forward: Any) -> Value:
        size, stride, padding, ceil, include_pad, override = as_forward
        w = windows(x.shape[-rank:], grad.shape[-rank:], size, stride, padding, 1, ceil)
        return avg_pool_gradient(b, grad, w, include_pad, override)


def avg_pool_gradient(
    b: GraphBuilder, grad: Value, w: Windows, include_pad: bool, override: int | None
) -> Value:
    """dx = sum of dy / divisor over the windows that contain the element."""
    if not grad.dtype.is_float:
        raise Decline("average pooling of integers")
    lead = grad.rank - w.rank
    share = lambda i, at: averaged(grad.compute(at), counted(w, at[lead:], include_pad, override))
    return _gathered(b, w, lead, share)


def _gathered(b: GraphBuilder, w: Windows, lead: int, share: Term) -> Value:
    """dx[i] = the sum of share(i, at) over the windows `at` that contain the element."""
    if math.prod(w.covering(d) for d in range(w.rank)) > WRITTEN_OUT:
        raise Decline("the windows overlap too much for a gather")
    return b.map(lambda i: _total((e, share(i, (*i[:lead], *o))) for o, e in w.holders(i[lead:])))


def _total(shares: Iterable[tuple[Expr, Expr]]) -> Expr:
    """The sum of the windows' terms for an element; each has the condition that it exists."""
    return ops.total([masked(exists, e, const(0, e.dtype)) for exists, e in shares])


def _adaptive_gradient(b: GraphBuilder, grad: Value, w: Adaptive) -> Value:
    """The same for adaptive windows, one dimension at a time, the last one first."""
    if not grad.dtype.is_float or any(w.covering(d) > WRITTEN_OUT for d in range(w.rank)):
        raise Decline("adaptive pooling with windows of several unknown sizes")
    out, lead = grad, grad.rank - w.rank
    for d in reversed(range(w.rank)):
        out = _along(b, out, w, d, lead + d)
    return out


def _along(b: GraphBuilder, dy: Value, w: Adaptive, d: int, dim: int) -> Value:
    def share(i: Index, o: Sym) -> Expr:
        start, end = w.ends(o, d)
        return averaged(dy.compute((*i[:dim], o, *i[dim + 1 :])), index(end - start))

    layout = b.result.layout.packed((*dy.shape[:dim], w.sizes[d], *dy.shape[dim + 1 :]))
    wide = replace(b.temp((), compute_dtype(dy.dtype)), layout=layout) if d else b.result
    return b.map(lambda i: _total((e, share(i, o)) for o, e in w.holders_along(d, i[dim])), wide)


def max_pool(b: GraphBuilder, x: Value, w: Windows) -> tuple[Value, Value]:
    """Maximum of each window and its flat position; NaN wins, the last one if there are several."""
    if w.area > MOST_TAPS:
        size = "many" if w.area == UNKNOWN else w.area
        raise Decline(f"a window of {size} elements, whose positions eager finds faster")
    lead, lowest = x.rank - w.rank, ops.neutral("max", compute_dtype(x.dtype))
    tap = _taps(x, w, lowest)

    def place(i: Index) -> Expr:
        o = i[lead:]
        # An element outside reads as the lowest number, which never wins.
        taps = [(tap(i, a), index(flatten(w.place(o, a), w.sizes))) for a in w.offsets()]
        return _greatest(taps, lowest, index(flatten(w.first(o), w.sizes)))

    values = b.map(lambda i: reduce(ops.maximum, [tap(i, a) for a in w.offsets()]))
    return values, b.map(place, b.results[1], "position")


def _greatest(taps: Sequence[tuple[Expr, Expr]], best: Expr, where: Expr) -> Expr:
    """The position of the maximum of (element, position) pairs: the first one, or the last NaN."""
    for e, place in taps:
        taken = e > best
        taken = taken | ops.isnan(e) if e.dtype.is_float else taken
        best = ops.where(taken, e, best)
        where = ops.where(taken, place, where)
    return where


def _enter_max(packet: str, rank: int) -> None:
    """Register max_poolNd_with_indices and its gradient."""

    lowering(packet)(
        lambda b, x, *how: max_pool(b, x, windows(x.shape[-rank:], b.result.shape[-rank:], *how))
    )

    @lowering(f"{packet}_backward")
    def backward(b: GraphBuilder, grad: Value, x: Value, *as_forward: Any) -> Value:
        *window, indices = as_forward
        w = windows(x.shape[-rank:], grad.shape[-rank:], *window)
        return max_pool_gradient(b, grad, w, indices)


def max_pool_gradient(b: GraphBuilder, grad: Value, w: Windows, indices: Value) -> Value:
    """dx = sum of dy over the windows whose maximum is the element."""
    lead = grad.rank - w.rank
    if not runs_programs(grad.device):
        # 131072 windows of 3 x 3: 0.13 ms as a scatter, 1.4 ms as a gather.
        return _unpooled(b, "add", grad, indices, w.sizes)

    def share(i: Index, at: Index) -> Expr:
        here = index(flatten(i[lead:], w.sizes))
        return ops.where(ops.eq(indices.at(at), here), grad.compute(at), 0)

    return _gathered(b, w, lead, share)


def _unpooled(
    b: GraphBuilder, mode: UpdateMode, x: Value, indices: Value, sizes: tuple[Sym, ...]
) -> Value:
    """Zeros with x added or written at flat positions of the last dimensions."""
    lead, count = x.rank - len(sizes), reduce(Sym.__mul__, sizes)
    if ZERO in (*x.shape, *sizes):
        return b.map(lambda i: const(0, b.result.dtype))
    if count.lo is None or count.lo < 1:
        raise Decline("no elements, perhaps")
    wide = b.result.dtype if mode == "set" else compute_dtype(b.result.dtype)
    flat = b.temp((*x.shape[:lead], count), wide)
    kept = b.result.layout
    if wide is b.result.dtype:  # contiguous pooled dimensions are one
        flat = replace(flat, layout=Layout(flat.shape, (*kept.stride[:lead], kept.stride[-1])))

    def update(i: Index) -> Update:
        at = checked(indices.at(i), count, fault="assert_in_bounds")
        return (*i[:lead], computed(0, count)), (at,), x.at(i)

    out = b.scatter(mode, const(0, wide), x.shape, update, flat)
    place: Move = lambda i: (*i[:lead], flatten(i[lead:], sizes))
    return b.view(out, place) if wide is b.result.dtype else b.map(lambda i: out.at(place(i)))


# The elements of x at their positions, zeros elsewhere.
lowering("max_unpool2d", "max_unpool3d")(
    lambda b, x, at, size, *_: _unpooled(b, "set", x, at, b.result.shape[-len(size) :])
)


def _enter_fractional(rank: int) -> None:
    """Register fractional_max_poolNd and its gradient."""

    @lowering(f"fractional_max_pool{rank}d")
    def forward(
        b: GraphBuilder, x: Value, kernel: Sequence[int], outs: Sequence[Sym | int], samples: Value
    ) -> tuple[Value, Value]:
        """Maxima and their positions, of windows placed by the random samples of a plane."""
        lead, t = x.rank - rank, compute_dtype(x.dtype)
        sizes = x.shape[lead:]
        if ZERO in b.result.shape:
            return b.map(lambda i: const(0, x.dtype)), b.map(lambda i: const(0, I64), b.results[1])
        if min(kernel) < 1 or math.prod(kernel) > MOST_TAPS:
            raise Decline("windows of no or many elements")
        if x.dtype.is_half and x.device == "cpu":
            raise Decline("windows of halves, whose starts eager rounds")

        def first(i: Index, d: int) -> Expr:
            # The start of window i of n: int((i + u) a) - int(u a) with a = (size - kernel) / (n -
            # 1).
            span, count = sizes[d] - kernel[d], b.result.shape[lead + d]
            plane = (i[0] if lead == 2 else ZERO, i[lead - 1])
            u = samples.compute((*plane, Int(1 - d if rank == 2 else d)))
            step = index(span, t) / index(maximum(count - 1, ONE), t)
            at = ((e + u) * step for e in (index(i[lead + d], t), const(0, t)))
            begin = reduce(ops.sub, [ops.cast(e, I64) for e in at])
            begin = ops.where(ops.eq(index(i[lead + d]), index(count - 1)), index(span), begin)
            return checked(begin, span + 1, fault="assert_in_bounds")

        def taps(i: Index) -> list[tuple[Expr, Expr]]:
            begins, found = [first(i, d) for d in range(rank)], []
            for a in itertools.product(*map(range, kernel)):
                at = [e + k for e, k in zip(begins, a, strict=True)]
                where = (*i[:lead], *(computed(d, n) for d, n in enumerate(sizes)))
                flat = at[0]
                for e, n in zip(at[1:], sizes[1:], strict=True):
                    flat = flat * index(n) + e
                found.append((x.compute(where, tuple(at)), flat))
            return found

        def place(i: Index) -> Expr:
            found = taps(i)
            return _greatest(found, const(-math.inf, t), found[0][1])

        values = b.map(lambda i: reduce(ops.maximum, [e for e, _ in taps(i)]))
        return values, b.map(place, b.results[1], "position")

    @lowering(f"fractional_max_pool{rank}d_backward")
    def backward(
        b: GraphBuilder, grad: Value, x: Value, kernel: Any, outs: Any, indices: Value
    ) -> Value:
        return _unpooled(b, "add", grad, indices, x.shape[x.rank - rank :])


def _enter_adaptive(packet: str, rank: int, of_max: bool) -> None:
    """Register adaptive pooling by the mean or the maximum, and its gradient."""

    @lowering(packet)
    def forward(b: GraphBuilder, x: Value, output_size: Sequence[Sym | int]) -> Any:
        full_rows(x, range(x.rank - rank - 1, x.rank))
        w = adaptive(x, output_size)
        return max_pool(b, x, w) if of_max else avg_pool(b, x, w, False, None)

    @lowering(f"{packet}_backward")
    def backward(b: GraphBuilder, grad: Value, x: Value, indices: Value | None = None) -> Any:
        w = adaptive(x, grad.shape[x.rank - rank :])
        if indices is not None:
            return max_pool_gradient(b, grad, w, indices)
        return _adaptive_gradient(b, grad, w)


for _rank in (2, 3):
    _enter_avg(f"avg_pool{_rank}d", _rank)
    _enter_max(f"max_pool{_rank}d_with_indices", _rank)
    _enter_fractional(_rank)
    _enter_adaptive(f"_adaptive_avg_pool{_rank}d", _rank, False)
    _enter_adaptive(f"adaptive_max_pool{_rank}d", _rank, True)
