"""Views: other indices into the same elements. If strides cannot express one, it is a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from lenz import ops
from lenz.errors import Unsupported
from lenz.ir.expr import index, reindex
from lenz.ir.graph import LOOPS, Ref, Scan, roots_of
from lenz.ir.tensor import Layout, TensorType, axis, contiguous
from lenz.lower.builder import Decline, GraphBuilder, Index, Move, Update, Value, alias, maker
from lenz.lower.dims import wrapped
from lenz.lower.operand import Size, Sizes, broadcast
from lenz.lower.registry import lowering
from lenz.sym import ONE, ZERO, Int, Sym, Var, flatten, maximum, minimum, product, sym, unflatten

PART = "strides over a storage of which the tensor may be a part"


def regroup(new: tuple[Sym, ...], old: tuple[Sym, ...]) -> Move:
    """The map from indices of one shape to those of another with as many elements.

    Both shapes are split wherever their leading sizes have equal products, so that unchanged
    dimensions keep their own variable and only merged or split ones need divisions.
    """
    if ZERO in new:
        # There are no indices, so any variable of empty range will do.
        nowhere = new.index(ZERO)
        return lambda i: tuple(i[nowhere] for _ in old)
    kept_new = [d for d, s in enumerate(new) if s is not ONE]
    kept_old = [d for d, s in enumerate(old) if s is not ONE]
    where_old = {p: k for k, p in enumerate(accumulate([old[d] for d in kept_old], Sym.__mul__))}
    cuts = [(0, 0)]
    for k, p in enumerate(accumulate([new[d] for d in kept_new], Sym.__mul__)):
        match = where_old.get(p)
        if match is not None and match + 1 > cuts[-1][1]:
            cuts.append((k + 1, match + 1))
    ends = (len(kept_new), len(kept_old))
    if cuts[-1] != ends:
        # The products agree only by facts about the symbols: a last group takes the rest, joined
        # with the group before it if one shape's rest consists of sizes that are 1 by such facts.
        if ends[0] == cuts[-1][0] or ends[1] == cuts[-1][1]:
            cuts[1:] = cuts[1:-1]
        cuts.append(ends)

    def fn(i: Index) -> Index:
        out: list[Sym] = [ZERO] * len(old)
        for (n0, o0), (n1, o1) in pairwise(cuts):
            mine, theirs = kept_new[n0:n1], kept_old[o0:o1]
            flat = flatten([i[d] for d in mine], [new[d] for d in mine])
            for d, v in zip(theirs, unflatten(flat, [old[d] for d in theirs]), strict=True):
                out[d] = v
        return tuple(out)

    return fn


# The same elements in row-major order, perhaps in another shape. An alias only stays if it is a
# result; the last two are no views for autograd.
lowering("view.default", "view_as", "reshape", "_reshape_alias", any_dtype=True)(
    lambda b, x, *_: b.view(x, regroup(b.result.shape, x.shape))
)
lowering("alias", "lift", "lift_fresh", any_dtype=True)(lambda b, x: b.view(x, lambda i: i))
lowering("detach", any_dtype=True)(lambda b, x: b.view(x, lambda i: i, detached=True))
lowering("_unsafe_view", any_dtype=True)(
    lambda b, x, *_: b.view(x, regroup(b.result.shape, x.shape), detached=True)
)


@lowering("permute", any_dtype=True)
def permute(b: GraphBuilder, x: Value, dims: Sequence[int]) -> Value:
    """Dimension k of the result is dimension dims[k] of x."""
    order = [wrapped(d, x.rank) for d in dims]

    def fn(i: Index) -> Index:
        where = dict(zip(order, i, strict=True))
        return tuple(where[d] for d in range(x.rank))

    return b.view(x, fn)


@lowering("transpose.int", any_dtype=True)
def transpose(b: GraphBuilder, x: Value, dim0: int, dim1: int) -> Value:
    """Two dimensions exchanged."""
    order = list(range(x.rank))
    if order:
        p, q = wrapped(dim0, x.rank), wrapped(dim1, x.rank)
        order[p], order[q] = q, p
    return permute(b, x, order)


# The transpose of a matrix; vectors stay.
lowering("t", any_dtype=True)(lambda b, x: permute(b, x, range(x.rank)[::-1]))


@lowering("expand", "expand_as", "broadcast_to", any_dtype=True)
def expand(b: GraphBuilder, x: Value, *_: object, implicit: bool = False) -> Value:
    """Size-1 dimensions repeated, and new ones in front."""
    return b.view(x, lambda i: broadcast(x, i))


@lowering("unsqueeze", any_dtype=True)
def unsqueeze(b: GraphBuilder, x: Value, dim: int) -> Value:
    """A new dimension of size 1."""
    d = wrapped(dim, x.rank + 1)
    return b.view(x, lambda i: (*i[:d], *i[d + 1 :]))


@lowering("squeeze", any_dtype=True)
def squeeze(b: GraphBuilder, x: Value, dim: int | Sequence[int] | None = None) -> Value:
    """Without size-1 dimensions: all, one, or some of them."""
    chosen = range(x.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    dropped = [d for d in (wrapped(d, x.rank) for d in chosen if x.rank) if x.shape[d] is ONE]
    if x.rank - len(dropped) != b.result.rank:
        raise Decline("a size is 1 only by a fact about its symbols")

    def fn(i: Index) -> Index:
        rest = iter(i)
        return tuple(ZERO if d in dropped else next(rest) for d in range(x.rank))

    return b.view(x, fn)


def at_least_zero(position: Size, size: Sym) -> Sym:
    """A position counted from the front; declines a symbolic position of unknown sign."""
    position = sym(position)
    if position.lo is not None and position.lo >= 0:
        return position
    if position.hi is not None and position.hi < 0:
        return size + position
    raise Decline("a position of unknown sign")


@lowering("select.int", any_dtype=True)
def select(b: GraphBuilder, x: Value, dim: int, index: Size) -> Value:
    """One slice, without its dimension."""
    d = wrapped(dim, x.rank)
    return b.view(x, lambda i: (*i[:d], at_least_zero(index, x.shape[d]), *i[d:]))


@lowering("slice.Tensor", any_dtype=True)
def slice_(
    b: GraphBuilder,
    x: Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> Value:
    """Every step-th element from `start`; the end follows from the result's size."""
    d = wrapped(dim, x.rank)
    return b.view(x, lambda i: (*i[:d], slice_start(start, x.shape[d]) + i[d] * step, *i[d + 1 :]))


def slice_start(start: Size | None, size: Sym) -> Sym:
    """The first position of a slice, clamped to 0 .. size as torch does.

    An empty slice has an offset too, where `as_strided` of it starts.
    """
    return minimum(maximum(at_least_zero(0 if start is None else start, size), ZERO), size)


lowering("narrow", any_dtype=True)(lambda b, x, dim, start, length: slice_(b, x, dim, start))


@lowering("diagonal", any_dtype=True)
def diagonal(b: GraphBuilder, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """A diagonal of two dimensions, as the last dimension of the result.

    An empty one starts where x does.
    """
    p, q = wrapped(dim1, x.rank), wrapped(dim2, x.rank)
    begin = 0 if b.result.shape[-1] is ZERO else offset
    down, right = max(-begin, 0), max(begin, 0)

    def fn(i: Index) -> Index:
        rest = iter(i[:-1])
        own = {p: i[-1] + down, q: i[-1] + right}
        return tuple(own[d] if d in own else next(rest) for d in range(x.rank))

    return b.view(x, fn)


@lowering("unfold", any_dtype=True)
def unfold(b: GraphBuilder, x: Value, dimension: int, size: Size, step: Size) -> Value:
    """Windows along a dimension; the position in the window is the last dimension of the result."""
    if x.rank == 0:
        return b.view(x, lambda i: ())
    d = wrapped(dimension, x.rank)
    return b.view(x, lambda i: (*i[:d], i[d] * step + i[-1], *i[d + 1 : -1]))


@lowering("as_strided", any_dtype=True)
def as_strided(
    b: GraphBuilder, x: Value, size: Sizes, stride: Sizes, storage_offset: Size | None = None
) -> Value:
    """Any strides over the storage of x."""
    return _strided(b, x, b.result, stride, storage_offset)


@lowering("as_strided_scatter", any_dtype=True)
def as_strided_scatter(
    b: GraphBuilder,
    x: Value,
    y: Value,
    size: Sizes,
    stride: Sizes,
    storage_offset: Size | None = None,
) -> Value:
    """x with the elements of as_strided(x) replaced by y."""
    if ZERO in x.shape or ZERO in y.shape:
        return b.map(x.at)
    pairs = zip(x.shape, x.buffer.type.layout.stride, strict=True)
    if any(s is ZERO and n is not ONE for n, s in pairs):  # eager writes to a dense copy
        x = b.map(x.at, b.temp(x.shape, x.dtype))
    if _is_whole(b, x):
        place = _from_start(x, y.shape, stride, storage_offset)
        return b.scatter("set", x, y.shape, lambda i: (place(i), (), y.at(i)))
    # The span of x, plus an element for the part of y outside it.
    own = x.buffer.type.layout
    first: Sym = ZERO
    span = sum(((n - 1) * s for n, s in zip(x.shape, own.stride, strict=True)), ONE)
    flat = TensorType(x.dtype, x.device, contiguous((span,)))
    memory = _strided(b, x, flat, (1,), None)
    if storage_offset is not None:
        start = Var(f"{memory.name}_start", 0)
        b.extern("lenz.offset", (Ref(x.name),), outs=(start,), reason=PART)
        first = sym(storage_offset) - start
    row = b.temp((span + 1,), x.dtype)
    base = b.map(lambda i: memory.at((minimum(i[0], span - 1),)), row)

    def update(i: Index) -> Update:
        at = index(first + Layout(y.shape, tuple(map(sym, stride))).at(i))
        inside = (at >= 0) & (at < index(span))
        at = ops.assert_in_range(ops.where(inside, at, index(span)), index(span + 1))
        return (axis("@0", span + 1).var,), (at,), y.at(i)

    made = b.scatter("set", base, y.shape, update, row)
    return b.map(lambda i: made.at((own.at(i) - own.offset,)))


def _strided(
    b: GraphBuilder, x: Value, type: TensorType, stride: Sizes, offset: Size | None
) -> Value:
    """Strides over a whole storage; over a part of one the runtime makes the view."""
    if ZERO not in type.shape:
        _refuse_gaps(b, x, Layout(type.shape, tuple(map(sym, stride))), offset)
    if _is_whole(b, x) and ZERO not in x.shape:
        return b.view(x, _from_start(x, type.shape, stride, offset), type)
    steps, start = tuple(map(sym, stride)), None if offset is None else sym(offset)
    return alias(b, "lenz.as_strided", x, type, type.shape, steps, start, reason=PART)


def _refuse_gaps(b: GraphBuilder, x: Value, of: Layout, offset: Size | None) -> None:
    """Raise Unsupported for reads around a written view: only eager has that memory.

    A loop of this graph makes a tensor with the view's strides, and nothing in its gaps.
    """
    made = maker(b, roots_of(b.nodes).get(x.name, x.name))
    if not isinstance(made, LOOPS):
        return
    own = made.out.type.layout
    start = x.buffer.type.layout.offset if offset is None else sym(offset)
    last = sum(((n - 1) * s for n, s in zip(of.shape, of.stride, strict=True)), start)
    left = own.storage - last
    if own.storage is not product(own.shape) or (isinstance(left, Int) and left.value <= 0):
        raise Unsupported("as_strided reads memory around a view that is written")


def _from_start(x: Value, shape: Sequence[Sym], stride: Sizes, offset: Size | None) -> Move:
    def fn(i: Index) -> Index:
        flat = sym(0 if offset is None else offset)
        for v, s, n in zip(i, [sym(s) for s in stride], shape, strict=True):
            flat = flat if n is ONE else flat + v * s
        return unflatten(flat, x.shape)

    return fn


def _is_whole(b: GraphBuilder, x: Value) -> bool:
    """True if a loop of this graph wrote the buffer, which then is its whole storage."""
    return x.buffer.type.layout.is_contiguous and isinstance(maker(b, x.name), LOOPS)


@lowering("split.Tensor", "split_with_sizes", "chunk", any_dtype=True)
@lowering("unsafe_split.Tensor", "unsafe_split_with_sizes", "unsafe_chunk", any_dtype=True)
def split(b: GraphBuilder, x: Value, sizes: object, dim: int = 0) -> tuple[Value, ...]:
    """x split along a dimension; the unsafe forms return views too, as in eager."""
    d = wrapped(dim, x.rank)
    part = lambda first, type: b.view(x, lambda i: (*i[:d], first + i[d], *i[d + 1 :]), type)
    types = [t for t in b.results if t is not None]
    return tuple(map(part, accumulate((t.shape[d] for t in types), initial=ZERO), types))


@lowering("unbind.int", any_dtype=True)
def unbind(b: GraphBuilder, x: Value, dim: int = 0) -> tuple[Value, ...]:
    """All slices along a dimension, without it."""
    d = wrapped(dim, x.rank)
    one = lambda k, type: b.view(x, lambda i: (*i[:d], sym(k), *i[d:]), type)
    return tuple(map(one, range(len(b.results)), b.results))


def reversed_scan(b: GraphBuilder, x: Value, turned: Sequence[int]) -> Value | None:
    """A flipped scan of x is the scan of flipped x in the other direction: no copy.

    So flip(cumsum(flip(g))), the gradient of cumsum, is one scan of g.
    """
    n = maker(b, x.name)
    if not isinstance(n, Scan) or list(turned) != [n.dim]:
        return None
    a = n.axes[n.dim]
    body = reindex(n.body, {a.var: a.extent - 1 - a.var})
    out = b.define(f"{x.name}_turned", b.result)
    b.nodes.append(replace(n, out=out, body=body, reverse=not n.reverse))
    return Value(out)


@lowering("flip", any_dtype=True)
def flip(b: GraphBuilder, x: Value, dims: Sequence[int]) -> Value:
    """Reversed dimensions: a copy, since torch has no negative strides."""
    turned = [wrapped(d, x.rank) for d in dims]
    if (scanned := reversed_scan(b, x, turned)) is not None:
        return scanned

    def fn(i: Index) -> Index:
        rows = enumerate(zip(i, x.shape, strict=True))
        return tuple(n - 1 - v if d in turned else v for d, (v, n) in rows)

    return b.map(lambda i: x.at(fn(i)))


@lowering("roll", any_dtype=True)
def roll(
    b: GraphBuilder, x: Value, shifts: Size | Sequence[Size], dims: int | Sequence[int] = ()
) -> Value:
    """Elements shifted cyclically by `shifts`; without dims in row-major order."""
    by: list[Size] = [shifts] if isinstance(shifts, (int, Sym)) else list(shifts)
    along = [dims] if isinstance(dims, int) else list(dims)
    if any(s is ZERO for s in x.shape):
        return b.map(x.at)
    if not along:
        total = product(x.shape)
        return b.map(lambda i: x.at(unflatten((flatten(i, x.shape) - by[0]) % total, x.shape)))

    def fn(i: Index) -> Index:
        out = list(i)
        for k, d in zip(by, along, strict=True):
            at = wrapped(d, x.rank)
            out[at] = (out[at] - k) % x.shape[at]
        return tuple(out)

    return b.map(lambda i: x.at(fn(i)))


@lowering("repeat", any_dtype=True)
def repeat(b: GraphBuilder, x: Value, repeats: Sequence[Size]) -> Value:
    """Copies of x side by side."""
    if ZERO in b.result.shape:
        nowhere = b.result.shape.index(ZERO)
        return b.map(lambda i: x.at(tuple(i[nowhere] for _ in x.shape)))
    added = len(repeats) - x.rank

    def fn(i: Index) -> Index:
        return tuple(
            ZERO if n is ONE else v if times == 1 else v % n
            for v, n, times in zip(i[added:], x.shape, repeats[added:], strict=True)
        )

    return b.map(lambda i: x.at(fn(i)))
