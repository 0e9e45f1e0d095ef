"""Joining, padding and slicing out: maps with guarded loads, so that none reads outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from lenz import ops
from lenz.ir.dtype import BOOL, compute_dtype
from lenz.ir.expr import Expr, const, index, masked
from lenz.lower.builder import At, Decline, GraphBuilder, Index, Value
from lenz.lower.dims import wrapped
from lenz.lower.operand import Size, Sizes, exact, number
from lenz.lower.registry import lowering
from lenz.lower.view import at_least_zero, slice_start
from lenz.sym import ONE, ZERO, Int, Sym, maximum, minimum, prove_le, sym

# Every part costs a comparison and a guarded load per element of the result.
MAX_PARTS = 16
MANY = "many parts: eager copies each, a map would test all per element"


def at_or_above(v: Sym, low: Sym) -> Expr:
    """low <= v; a constant if proved."""
    return const(True, BOOL) if prove_le(low, v) else index(low) <= index(v)


def below(v: Sym, high: Sym) -> Expr:
    """v < high; a constant if proved."""
    return const(True, BOOL) if prove_le(v + 1, high) else index(v) < index(high)


def guarded(cond: Expr, value: Expr, other: Expr) -> Expr:
    """`value` under a condition, or plain if the condition is always true."""
    return value if ops.is_value(cond, True) else masked(cond, value, other)


@lowering("cat", "concat", "concatenate", float8=True)
def cat(b: GraphBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Tensors joined along a dimension; empty 1-d tensors are skipped, as in torch."""
    rank = b.result.rank
    parts = [x for x in tensors if x.rank == rank and not (x.shape == (ZERO,) and rank == 1)]
    if not parts:
        return b.map(lambda i: const(0, b.result.dtype))
    d = wrapped(dim, rank)
    parts = [x for x in parts if x.shape[d] is not ZERO] or parts[:1]
    if len(parts) > MAX_PARTS:
        raise Decline(MANY)
    ends = [x.shape[d] for x in parts]
    return b.map(lambda i: _joined(b, i, d, parts, ends, lambda v: (*i[:d], v, *i[d + 1 :])))


@lowering("stack", float8=True)
def stack(b: GraphBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Tensors of one shape along a new dimension."""
    if len(tensors) > MAX_PARTS:
        raise Decline(MANY)
    d = wrapped(dim, b.result.rank)
    ends: list[Sym] = [ONE] * len(tensors)
    return b.map(lambda i: _joined(b, i, d, list(tensors), ends, lambda v: (*i[:d], *i[d + 1 :])))


def _joined(
    b: GraphBuilder,
    i: Index,
    d: int,
    parts: list[Value],
    sizes: list[Sym],
    inside: Callable[[Sym], Index],
) -> Expr:
    """The element of the part that contains i[d]; inside(position in it) is its index there."""
    t = b.result.dtype
    ends = pairwise(accumulate(sizes, initial=ZERO))
    out = const(0, t)
    for x, (low, high) in reversed(list(zip(parts, ends, strict=True))):
        # `other` is evaluated everywhere, so each part checks both ends.
        cond = at_or_above(i[d], low) & below(i[d], high)
        out = guarded(cond, ops.cast(x.at(inside(i[d] - low)), t), out)
    return out


@lowering("constant_pad_nd", float8=True)
def constant_pad(b: GraphBuilder, x: Value, pad: Sizes, value: Any = 0) -> Value:
    """A border of one value, from the last dimension on; negative widths crop."""
    t = b.result.dtype
    before, after = _before(x, pad), _before(x, [*pad[1:], 0])
    pairs = zip(x.shape * 2, before + after, strict=True)
    # A symbolic width that may have either sign is not doubted: most are sums of sizes.
    cropped = [n + width for n, width in pairs if width.hi is not None and width.hi < 0]
    if not all(prove_le(ZERO, n) for n in cropped):
        raise Decline("more may be cropped than there is, an error in eager")
    if any(s is ZERO for s in x.shape):
        return b.map(lambda i: number(value, t))

    def fn(i: Index) -> Expr:
        where = tuple(v - lo for v, lo in zip(i, before, strict=True))
        cond = const(True, BOOL)
        for v, n in zip(where, x.shape, strict=True):
            cond = cond & (at_or_above(v, ZERO) & below(v, n))
        return guarded(cond, x.at(where), number(value, t))

    return b.map(fn)


def _before(x: Value, pad: Sizes) -> list[Sym]:
    """The width of the border before each dimension; `pad` counts from the last dimension."""
    before: list[Sym] = [ZERO] * x.rank
    for k in range(len(pad) // 2):
        before[x.rank - 1 - k] = sym(pad[2 * k])
    return before


@lowering("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", any_dtype=True)
def reflection_pad(b: GraphBuilder, x: Value, padding: Sizes) -> Value:
    """A border that mirrors the inside, without the edge itself."""

    def place(v: Sym, n: Sym) -> Sym:
        from_end = n - 1 - maximum(v, -v)
        return n - 1 - maximum(from_end, -from_end)

    return _bordered(b, x, padding, place)


@lowering("replication_pad1d", "replication_pad2d", "replication_pad3d", any_dtype=True)
def replication_pad(b: GraphBuilder, x: Value, padding: Sizes) -> Value:
    """A border that repeats the edge."""
    return _bordered(b, x, padding, lambda v, n: maximum(minimum(v, n - 1), ZERO))


def _bordered(b: GraphBuilder, x: Value, padding: Sizes, place: Callable[[Sym, Sym], Sym]) -> Value:
    before = _before(x, padding)

    def fn(i: Index) -> Index:
        moved = [v - lo for v, lo in zip(i, before, strict=True)]
        for d in range(x.rank - len(padding) // 2, x.rank):
            moved[d] = place(moved[d], x.shape[d])
        return tuple(moved)

    return b.map(lambda i: x.at(fn(i)))


# The positions of a padded dimension that may show element h of n, with `low` elements in front;
# each with a further condition besides being inside, or None.
Shown = Callable[[Sym, Sym, Sym, Sym], list[tuple[Sym, Expr | None]]]


def _mirrored(h: Sym, n: Sym, low: Sym, high: Sym) -> list[tuple[Sym, Expr | None]]:
    return [
        (h + low, None),
        (low - h, index(h) >= index(ONE)),
        (low + 2 * (n - 1) - h, index(h) <= index(n - 2)),
    ]


def _repeated(h: Sym, n: Sym, low: Sym, high: Sym) -> list[tuple[Sym, Expr | None]]:
    found: list[tuple[Sym, Expr | None]] = [(h + low, None)]
    first, last = ops.eq(index(h), index(ZERO)), ops.eq(index(h), index(n - 1))
    found += [(sym(k), first) for k in range(max(low.lo or 0, 0))]
    return found + [(n + low + k, last) for k in range(max(high.lo or 0, 0))]


def _enter_border_gradient(kind: str, rank: int, shown: Shown) -> None:
    """Register the gradient of a border: each element gathers from the positions that show it."""

    @lowering(f"{kind}_pad{rank}d_backward")
    def backward(b: GraphBuilder, grad: Value, x: Value, padding: Sizes) -> Value:
        widths = [sym(p) for p in padding]
        if ZERO in (*grad.shape, *x.shape):
            return b.map(lambda i: const(0, x.dtype))
        if shown is _repeated and not all(isinstance(p, Int) for p in widths):
            raise Decline("a border of unknown width, whose gradients all go to the edge")
        if shown is _repeated and sum(abs(p.lo or 0) for p in widths) > 4 * MAX_PARTS:
            raise Decline("a wide border, whose gradients all go to the edge")
        out = grad
        for k in range(rank):
            d, ends = x.rank - 1 - k, widths[2 * k : 2 * k + 2]
            out = _from_border(b, out, x.shape[d], d, ends, shown, k + 1 == rank)
        return out


def _from_border(
    b: GraphBuilder, dy: Value, n: Sym, d: int, widths: list[Sym], shown: Shown, is_last: bool
) -> Value:
    low, high = widths

    def at(i: Index) -> Expr:
        parts: list[Expr] = []
        for o, where in shown(i[d], n, low, high):
            cond = at_or_above(o, ZERO) & below(o, dy.shape[d])
            cond = cond if where is None else cond & where
            e = dy.compute((*i[:d], o, *i[d + 1 :]))
            parts.append(guarded(cond, e, const(0, e.dtype)))
        return ops.total(parts)

    shape = (*dy.shape[:d], n, *dy.shape[d + 1 :])
    return b.map(at, None if is_last else b.temp(shape, compute_dtype(dy.dtype)))


for _rank in (1, 2, 3):
    _enter_border_gradient("reflection", _rank, _mirrored)
    _enter_border_gradient("replication", _rank, _repeated)


def _base(b: GraphBuilder, x: Value | None, i: Index) -> Expr:
    """An element of x in the result's type, or 0 without x."""
    t = b.result.dtype
    return const(0, t) if x is None else exact(x, i, t)


@lowering("select_scatter", float8=True)
def select_scatter(b: GraphBuilder, x: Value | None, src: Value, dim: int, at: Size) -> Value:
    """x, or zeros, with one slice replaced."""
    d = wrapped(dim, b.result.rank)
    place = at_least_zero(at, b.result.shape[d])
    t = b.result.dtype

    def fn(i: Index) -> Expr:
        hit = ops.eq(index(i[d]), index(place))
        return ops.where(hit, exact(src, (*i[:d], *i[d + 1 :]), t), _base(b, x, i))

    return b.map(fn)


@lowering("slice_scatter", float8=True)
def slice_scatter(
    b: GraphBuilder,
    x: Value | None,
    src: Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> Value:
    """x, or zeros, with a slice replaced."""
    d = wrapped(dim, b.result.rank)
    first = slice_start(start, b.result.shape[d])
    count, t, stride = src.shape[d], b.result.dtype, sym(step)
    if count is ZERO:
        return b.map(lambda i: _base(b, x, i))

    def fn(i: Index) -> Expr:
        moved = i[d] - first
        cond = at_or_above(moved, ZERO) & below(moved, (count - 1) * stride + 1)
        if stride is not ONE:
            cond = cond & ops.eq(index(moved % stride), index(ZERO))
        return guarded(cond, exact(src, (*i[:d], moved // stride, *i[d + 1 :]), t), _base(b, x, i))

    return b.map(fn)


@lowering("diagonal_scatter")
def diagonal_scatter(
    b: GraphBuilder, x: Value | None, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    """x, or zeros, with a diagonal replaced."""
    rank = b.result.rank
    p, q = wrapped(dim1, rank), wrapped(dim2, rank)
    down, right = max(-offset, 0), max(offset, 0)
    count, t = src.shape[-1], b.result.dtype

    def fn(i: Index) -> Expr:
        k = i[p] - down
        cond = ops.eq(index(k), index(i[q] - right)) & (at_or_above(k, ZERO) & below(k, count))
        rest = tuple(v for d, v in enumerate(i) if d not in (p, q))
        return guarded(cond, exact(src, (*rest, k), t), _base(b, x, i))

    return b.map(fn)


# Gradients of slices: zeros around dy; and matrices from diagonals.
lowering("select_backward")(lambda b, dy, _, *at: select_scatter(b, None, dy, *at))
lowering("slice_backward")(lambda b, dy, _, *at: slice_scatter(b, None, dy, *at))
lowering("diagonal_backward")(lambda b, dy, _, *at: diagonal_scatter(b, None, dy, *at))
lowering("diag_embed")(
    lambda b, x, offset=0, dim1=-2, dim2=-1: diagonal_scatter(b, None, x, offset, dim1, dim2)
)


def _enter_triangle(name: str, kept: Callable[[Expr, Expr], Expr]) -> None:
    """Register the elements at columns j with kept(i + diagonal, j), zeros elsewhere."""

    @lowering(name)
    def triangle(b: GraphBuilder, x: Value, diagonal: Size = 0) -> Value:
        holds: At = lambda i: kept(index(i[-2] + diagonal), index(i[-1]))
        return b.map(lambda i: ops.where(holds(i), x.at(i), 0))


_enter_triangle("triu", ops.le)
_enter_triangle("tril", lambda i, j: j <= i)
