"""Pooling over windows, and its gradients as gathers: what an input element gets from each window.

A small window is written out, so that the loop over outputs is what vectorises; a large one is a
reduction. Input positions outside of the tensor are never read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from lenz import ops
from lenz.ir.dtype import I64, compute_dtype
from lenz.ir.expr import Expr, const, index, masked
from lenz.lower.builder import Decline, GraphBuilder, Index, Value
from lenz.lower.registry import lowering
from lenz.sym import ONE, ZERO, Int, Sym, ceildiv, maximum, minimum, sym

# More elements than this in a window are reduced in a loop instead of written out.
WRITTEN_OUT = 32

Offsets = tuple[Sym, ...]


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows over the last dimensions: o covers o*stride - padding + a*dilation, a < kernel."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    sizes: tuple[Sym, ...]
    outs: tuple[Sym, ...]
    ceil: bool

    @property
    def rank(self) -> int:
        """Number of pooled dimensions."""
        return len(self.kernel)

    @property
    def area(self) -> int:
        """Elements of one window."""
        return math.prod(self.kernel)

    def offsets(self) -> list[Offsets]:
        """Every place in a window, in row-major order."""
        return [
            tuple(Int(a) for a in place)
            for place in itertools.product(*(range(k) for k in self.kernel))
        ]

    def place(self, o: Index, a: Offsets) -> Index:
        """Where place `a` of window `o` lies in the input."""
        return tuple(
            o[d] * self.stride[d] - self.padding[d] + a[d] * self.dilation[d]
            for d in range(self.rank)
        )

    def inside(self, o: Index, a: Offsets) -> Expr | None:
        """Whether that place is in the input; None where it always is."""
        conditions: list[Expr] = []
        for d, at in enumerate(self.place(o, a)):
            pad, step = self.padding[d], self.dilation[d]
            low, high = a[d].lo or 0, a[d].hi
            if low * step < pad:
                conditions.append(ops.ge(index(at), const(0, I64)))
            # Without ceil_mode the last window ends within the padding on the right.
            if self.ceil or high is None or (self.kernel[d] - 1 - high) * step < pad:
                conditions.append(ops.lt(index(at), index(self.sizes[d])))
        return reduce(ops.and_, conditions) if conditions else None

    def read(self, at: Callable[[Index], Expr], o: Index, a: Offsets, other: float) -> Expr:
        """The input at place `a` of window `o`, `other` outside."""
        value, inside = at(self.place(o, a)), self.inside(o, a)
        return value if inside is None else masked(inside, value, const(other, value.dtype))

    def covering(self, d: int) -> int:
        """How many windows at most hold one input position along a dimension."""
        return (self.kernel[d] - 1) * self.dilation[d] // self.stride[d] + 1

    def holders(self, h: Index) -> list[tuple[Index, Expr]]:
        """The windows that may hold an input position, each with whether there is such a window."""
        found: list[tuple[Index, Expr]] = []
        for back in itertools.product(*(range(self.covering(d)) for d in range(self.rank))):
            o = tuple(
                (h[d] + self.padding[d]) // self.stride[d] - back[d] for d in range(self.rank)
            )
            there = [ops.ge(index(k), const(0, I64)) for k, b in zip(o, back, strict=True) if b]
            there += [ops.lt(index(k), index(n)) for k, n in zip(o, self.outs, strict=True)]
            found.append((o, reduce(ops.and_, there)))
        return found


def windows(
    sizes: tuple[Sym, ...],
    outs: tuple[Sym, ...],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil: bool,
) -> Windows:
    """Fill in what the ops leave out: one number for all dimensions, the stride from the kernel."""
    n = len(kernel) if len(kernel) > 1 else len(sizes)

    def full(v: int | Sequence[int]) -> tuple[int, ...]:
        t = (v,) if isinstance(v, int) else tuple(v)
        return t * n if len(t) == 1 else t

    k = full(kernel)
    return Windows(
        k, full(stride) if stride else k, full(padding), full(dilation), sizes[-n:], outs[-n:], ceil
    )


def divisor(w: Windows, o: Index, include_pad: bool, override: int | None) -> Expr | int:
    """What the sum of a window is divided by, as eager counts; no less than 1."""
    if override is not None:
        return override
    if not w.ceil and (include_pad or not any(w.padding)):
        return w.area
    n: Sym = ONE
    for d in range(w.rank):
        start = o[d] * w.stride[d] - w.padding[d]
        end = minimum(start + w.kernel[d], w.sizes[d] + w.padding[d])
        if not include_pad:
            start, end = maximum(start, ZERO), minimum(end, w.sizes[d])
        # A window that ceil_mode puts into the right padding has no elements; its sum is 0.
        n = n * maximum(end - start, ONE)
    return index(n)


def divided(e: Expr, by: Expr | int) -> Expr:
    """e / by in the type of e."""
    return ops.div(e, const(by, e.dtype) if isinstance(by, int) else ops.cast(by, e.dtype))


def avg_pool(
    b: GraphBuilder, x: Value, w: Windows, include_pad: bool, override: int | None
) -> Value | Decline:
    """Mean of each window."""
    if not x.dtype.is_float:
        return Decline("average pooling of integers")
    if override == 0:
        return Decline("eager refuses a divisor of zero")
    lead = x.rank - w.rank

    def tap(i: Index, a: Offsets) -> Expr:
        return w.read(lambda at: x.compute((*i[:lead], *at)), i[lead:], a, 0.0)

    if w.area <= WRITTEN_OUT:

        def mean(i: Index) -> Expr:
            total = reduce(ops.add, [tap(i, a) for a in w.offsets()])
            return divided(total, divisor(w, i[lead:], include_pad, override))

        return b.map(mean)
    over = tuple(Int(k) for k in w.kernel)
    total = b.reduce(
        "sum", b.result.shape, over, tap, type=b.temp(b.result.shape, compute_dtype(x.dtype))
    )
    return b.map(lambda i: divided(total.at(i), divisor(w, i[lead:], include_pad, override)))


def _enter_avg(packet: str, rank: int) -> None:
    """Register avg_poolNd and its gradient."""

    @lowering(packet)
    def forward(
        b: GraphBuilder,
        x: Value,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value | Decline:
        sizes, outs = x.shape[x.rank - rank :], b.result.shape[x.rank - rank :]
        w = windows(sizes, outs, kernel_size, stride, padding, 1, ceil_mode)
        return avg_pool(b, x, w, count_include_pad, divisor_override)

    @lowering(f"{packet}_backward")
    def backward(
        b: GraphBuilder,
        grad: Value,
        x: Value,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: int | Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Value | Decline:
        sizes, outs = x.shape[x.rank - rank :], grad.shape[x.rank - rank :]
        w = windows(sizes, outs, kernel_size, stride, padding, 1, ceil_mode)
        return avg_pool_gradient(b, grad, w, count_include_pad, divisor_override)


def avg_pool_gradient(
    b: GraphBuilder, grad: Value, w: Windows, include_pad: bool, override: int | None
) -> Value | Decline:
    """dx = sum of dy / divisor over the windows that hold the element."""
    if not grad.dtype.is_float:
        return Decline("average pooling of integers")
    if math.prod(w.covering(d) for d in range(w.rank)) > WRITTEN_OUT:
        return Decline("the windows overlap too much for a gather")
    lead = grad.rank - w.rank

    def at(i: Index) -> Expr:
        h = i[lead:]
        parts: list[Expr] = []
        for o, exists in w.holders(h):
            for d in range(w.rank):
                # h lies before the end of the window; it is not before its start by choice of o.
                past = h[d] + w.padding[d] - o[d] * w.stride[d]
                exists = ops.and_(exists, ops.lt(index(past), const(w.kernel[d], I64)))
            dy = divided(grad.compute((*i[:lead], *o)), divisor(w, o, include_pad, override))
            parts.append(masked(exists, dy, const(0, dy.dtype)))
        return reduce(ops.add, parts)

    return b.map(at)


_enter_avg("avg_pool2d", 2)
_enter_avg("avg_pool3d", 3)


def flat_place(at: Index, sizes: tuple[Sym, ...]) -> Sym:
    """Row-major position in the pooled dimensions, as the indices of max pooling state it."""
    flat: Sym = ZERO
    for k, n in zip(at, sizes, strict=True):
        flat = flat * n + k
    return flat


def max_pool(b: GraphBuilder, x: Value, w: Windows) -> tuple[Value, Value] | Decline:
    """Greatest element of each window and its flat position; NaN wins, the last of them."""
    if not x.dtype.is_float:
        return Decline("max pooling of integers")
    if w.area > WRITTEN_OUT:
        return Decline(f"a window of {w.area} elements, whose positions eager finds faster")
    lead = x.rank - w.rank

    def tap(i: Index, a: Offsets) -> Expr:
        return w.read(lambda at: x.compute((*i[:lead], *at)), i[lead:], a, -math.inf)

    def position(i: Index) -> Expr:
        o = i[lead:]
        best: Expr = const(-math.inf, compute_dtype(x.dtype))
        where: Expr = index(flat_place(_first_inside(w, o), w.sizes))
        for a in w.offsets():
            e = tap(i, a)
            # An element outside reads as -inf, which is never greater.
            taken = ops.or_(ops.gt(e, best), ops.isnan(e))
            best = ops.where(taken, e, best)
            where = ops.where(taken, index(flat_place(w.place(o, a), w.sizes)), where)
        return where

    values = b.map(lambda i: reduce(ops.maximum, [tap(i, a) for a in w.offsets()]))
    return values, b.map(position, b.results[1], "position")


def _first_inside(w: Windows, o: Index) -> Index:
    """The first place of a window that lies in the input: the position when all are -inf."""
    first: list[Sym] = []
    for d, start in enumerate(w.place(o, (ZERO,) * w.rank)):
        step = w.dilation[d]
        first.append(start + ceildiv(maximum(-start, ZERO), Int(step)) * step)
    return tuple(first)


def _enter_max(packet: str, rank: int) -> None:
    """Register max_poolNd_with_indices and its gradient."""

    @lowering(packet)
    def forward(
        b: GraphBuilder,
        x: Value,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
    ) -> tuple[Value, Value] | Decline:
        sizes, outs = x.shape[x.rank - rank :], b.result.shape[x.rank - rank :]
        return max_pool(
            b, x, windows(sizes, outs, kernel_size, stride, padding, dilation, ceil_mode)
        )

    @lowering(f"{packet}_backward")
    def backward(
        b: GraphBuilder,
        grad: Value,
        x: Value,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
        ceil_mode: bool,
        indices: Value,
    ) -> Value | Decline:
        sizes, outs = x.shape[x.rank - rank :], grad.shape[x.rank - rank :]
        w = windows(sizes, outs, kernel_size, stride, padding, dilation, ceil_mode)
        return max_pool_gradient(b, grad, w, indices)


def max_pool_gradient(b: GraphBuilder, grad: Value, w: Windows, indices: Value) -> Value | Decline:
    """dx = sum of dy over the windows whose position is the element."""
    if math.prod(w.covering(d) for d in range(w.rank)) > WRITTEN_OUT:
        return Decline("the windows overlap too much for a gather")
    lead = grad.rank - w.rank

    def at(i: Index) -> Expr:
        h = i[lead:]
        here = index(flat_place(h, w.sizes))
        parts: list[Expr] = []
        for o, exists in w.holders(h):
            full = (*i[:lead], *o)
            dy = grad.compute(full)
            zero = const(0, dy.dtype)
            chosen = ops.eq(indices.at(full), here)
            parts.append(masked(exists, ops.where(chosen, dy, zero), zero))
        return reduce(ops.add, parts)

    return b.map(at)


_enter_max("max_pool2d_with_indices", 2)
_enter_max("max_pool3d_with_indices", 3)


def equal_windows(sizes: tuple[Sym, ...], outs: Sequence[Sym | int]) -> tuple[Sym, ...] | None:
    """The size of the windows of adaptive pooling where all are equal, else None."""
    found: list[Sym] = []
    for n, o in zip(sizes, outs, strict=True):
        k = n // sym(o) if sym(o) is not ZERO else ZERO
        if k * sym(o) is not n or k is ZERO:
            return None
        found.append(k)
    return tuple(found)


def _enter_adaptive(packet: str, rank: int) -> None:
    """Register _adaptive_avg_poolNd and its gradient, for sizes that the output divides."""

    @lowering(packet)
    def forward(b: GraphBuilder, x: Value, output_size: Sequence[Sym | int]) -> Value | Decline:
        lead = x.rank - rank
        k = equal_windows(x.shape[lead:], output_size)
        if k is None or not x.dtype.is_float:
            return Decline("adaptive pooling with windows of several sizes")

        def at(i: Index, r: Index) -> Expr:
            places = tuple(o * n + a for o, n, a in zip(i[lead:], k, r, strict=True))
            return x.compute((*i[:lead], *places))

        by = reduce(Sym.__mul__, k)
        return b.reduce("sum", b.result.shape, k, at, lambda a: divided(a, index(by)))

    @lowering(f"{packet}_backward")
    def backward(b: GraphBuilder, grad: Value, x: Value) -> Value | Decline:
        lead = x.rank - rank
        k = equal_windows(x.shape[lead:], grad.shape[lead:])
        if k is None or not grad.dtype.is_float:
            return Decline("adaptive pooling with windows of several sizes")
        by = reduce(Sym.__mul__, k)

        def at(i: Index) -> Expr:
            o = tuple(h // n for h, n in zip(i[lead:], k, strict=True))
            return divided(grad.compute((*i[:lead], *o)), index(by))

        return b.map(at)


_enter_adaptive("_adaptive_avg_pool2d", 2)
_enter_adaptive("_adaptive_avg_pool3d", 3)


def _adaptive_windows(x: Value, outs: Sequence[Sym | int]) -> Windows | None:
    """The windows of adaptive max pooling where all are equal and of known size, else None."""
    rank = len(outs)
    sizes = x.shape[x.rank - rank :]
    k = equal_windows(sizes, outs)
    if k is None or not all(isinstance(n, Int) for n in k):
        return None
    width = tuple(n.value for n in k if isinstance(n, Int))
    none, one = (0,) * rank, (1,) * rank
    return Windows(width, width, none, one, sizes, tuple(sym(o) for o in outs), False)


def _enter_adaptive_max(packet: str, rank: int) -> None:
    """Register adaptive_max_poolNd and its gradient, for sizes that the output divides."""

    @lowering(packet)
    def forward(
        b: GraphBuilder, x: Value, output_size: Sequence[Sym | int]
    ) -> tuple[Value, Value] | Decline:
        w = _adaptive_windows(x, output_size)
        if w is None:
            return Decline("adaptive pooling with windows of several sizes")
        return max_pool(b, x, w)

    @lowering(f"{packet}_backward")
    def backward(b: GraphBuilder, grad: Value, x: Value, indices: Value) -> Value | Decline:
        w = _adaptive_windows(x, grad.shape[x.rank - rank :])
        if w is None:
            return Decline("adaptive pooling with windows of several sizes")
        return max_pool_gradient(b, grad, w, indices)


_enter_adaptive_max("adaptive_max_pool2d", 2)
_enter_adaptive_max("adaptive_max_pool3d", 3)
