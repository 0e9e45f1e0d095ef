"""Mean and sum of squared deviations of many sets of numbers, read once on GPUs.

A rounded mean m is corrected by the deviations from it (the corrected two-pass algorithm; Chan,
Golub and LeVeque, 1983), so that equal numbers give their exact mean and variance 0:

    d = sum(x - m) / n        mean = m + d        sum((x - mean)^2) = sum((x - m)^2) - n d^2

A set too long for the registers of a program is split into chunks of k elements. A program holds
one chunk (or those of some adjacent channels) and computes its mean c and q = sum((x - c)^2), both
corrected this way. Chan, Golub and LeVeque (1979) combine the chunks (c, q, k) of n elements:

    mean = sum(k c) / n        sum((x - mean)^2) = sum(q + k (c - mean)^2)

All terms are positive, so that a mean far from zero costs no digits. Only the rounding of such a
mean is left, so the few means of chunks are added in f64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from lenz import ops
from lenz.ir.dtype import F64, I64, DType, compute_dtype
from lenz.ir.expr import Expr, const, index, masked
from lenz.ir.tensor import TensorType, axes_for
from lenz.lower.builder import At, Fn, GraphBuilder, Index, Term, Value
from lenz.lower.dims import count
from lenz.machines import capabilities_of
from lenz.records import dataclass
from lenz.sym import ONE, ZERO, Int, Sym, affine_in, ceildiv, minimum, power_of_two

# Fractions of a tile that the chunk of a row has, or a tile of column chunks: the largest that
# leave half of a machine's `programs` to run at once. Row sums are written and read in at most 2%
# of the bytes of a bf16 x, column sums in 4% if there are enough programs, else 16%.
# opt/split_reduce does not split them again.
ROWS, COLUMNS = (1, 2, 4, 8), (1, 2, 4)
# Shorter runs, adjacent to those of another set, are columns if that gives chunks of TALL. A
# program that holds whole sets tolerates runs of RUN: the rest of a cache line is in L2.
SHORT, TALL, RUN = 64, 256, 8
# Rows are split at multiples of this many elements, where 16-byte loads can start in any type.
ALIGNED = 16

Types = tuple[TensorType, TensorType]
Dim = tuple[bool, int]  # (True, d) is dimension d of the rows, (False, d) of `over`


@dataclass(frozen=True, slots=True)
class Sets:
    """The elements x[join(i, r)] for r in `over` are one set, for every i in `rows`.

    The statistics have the shape `rows`, which may have ones for reduced dimensions.
    """

    x: Value
    rows: tuple[Sym, ...]
    over: tuple[Sym, ...]
    join: Callable[[Index, Index], Index]

    @property
    def dtype(self) -> DType:
        """The type that statistics are computed in."""
        return compute_dtype(self.x.dtype)

    @property
    def is_static(self) -> bool:
        """True when all sizes and strides of x are numbers."""
        layout = self.x.buffer.type.layout
        return all(isinstance(s, Int) for s in (*layout.shape, *layout.stride))

    def at(self, i: Index, r: Index) -> Expr:
        """Element r of set i."""
        return self.x.compute(self.join(i, r))


def moments(b: GraphBuilder, s: Sets, types: Types, finish: Fn, name: str) -> tuple[Value, Value]:
    """The mean of each set, and finish(sum((x - mean)^2)), whose node is named `name`.

    `types` are the types of the two, of shape `s.rows`.
    """
    chunks = chunks_of(b, s)
    if chunks is not None:
        return _of_chunks(b, chunks, types, finish, name)
    n, part = count(s.over, s.dtype), b.temp(s.rows, s.dtype, s.x)
    first = b.reduce("sum", s.rows, s.over, s.at, lambda a: a / n, types[0], "mean")
    deviation: Term = lambda i, r: s.at(i, r) - first.at(i)
    square = lambda i, r: ops.square(deviation(i, r))
    off = b.reduce("sum", s.rows, s.over, deviation, lambda a: a / n, part, "off")
    squares = b.reduce("sum", s.rows, s.over, square, type=part, name="squares")
    mean = b.map(lambda i: first.at(i) + off.at(i), types[0], "mean")
    rest = lambda i: finish(ops.maximum(squares.at(i) - ops.square(off.at(i)) * n, 0))
    return mean, b.map(rest, types[1], name)


def _of_chunks(
    b: GraphBuilder, c: Chunks, types: Types, finish: Fn, name: str
) -> tuple[Value, Value]:
    s, n = c.sets, count(c.sets.over, F64)
    part = b.temp(c.places, s.dtype, s.x)

    def of_chunks(name: str, fn: Callable[[Index, Expr], Expr]) -> Value:
        """The sum of fn(chunk, element) over the elements of each chunk."""
        at = lambda p, r: c.element(p, r, lambda e: fn(p, e))
        return b.reduce("sum", c.places, c.inner, at, type=part, name=name)

    sums = of_chunks("chunk_sum", lambda p, e: e)
    centre: At = lambda p: sums.at(p) / c.number(p)
    off = of_chunks("chunk_off", lambda p, e: e - centre(p))
    shift: At = lambda p: off.at(p) / c.number(p)
    squares = of_chunks("chunk_squares", lambda p, e: ops.square(e - centre(p)))

    def wide(i: Index, at: Index) -> Expr:
        p = c.place(i, at)
        return (ops.cast(centre(p), F64) + ops.cast(shift(p), F64)) * ops.cast(c.number(p), F64)

    def spread(i: Index, at: Index) -> Expr:
        p = c.place(i, at)
        own = squares.at(p) - off.at(p) * shift(p)
        away = centre(p) - mean.at(i) + shift(p)
        return own + ops.square(away) * c.number(p)

    mean = b.reduce("sum", s.rows, c.parts, wide, lambda a: a / n, types[0], "mean")
    rest = lambda a: finish(ops.maximum(a, 0))
    return mean, b.reduce("sum", s.rows, c.parts, spread, rest, types[1], name)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sets split along the dimensions of `over`: a chunk has size[d] elements of dimension d.

    `order` are the dimensions that number the chunks, in memory order; the sums of all chunks have
    these dimensions.
    """

    sets: Sets
    size: tuple[int, ...]
    order: tuple[Dim, ...]

    def count(self, d: int) -> Sym:
        """The number of parts of dimension d of `over`."""
        return ceildiv(self.sets.over[d], Int(self.size[d]))

    @property
    def places(self) -> tuple[Sym, ...]:
        """The shape of the sums of all chunks."""
        return tuple(self.sets.rows[d] if is_row else self.count(d) for is_row, d in self.order)

    @property
    def parts(self) -> tuple[Sym, ...]:
        """The shape of the chunks of one set."""
        return tuple(self.count(d) for is_row, d in sorted(self.order) if not is_row)

    @property
    def inner(self) -> tuple[Sym, ...]:
        """The shape of one chunk."""
        return tuple(Int(n) for n in self.size if n > 1)

    def place(self, i: Index, part: Index) -> Index:
        """The index of the sums of a part of set i."""
        left = iter(part)
        at = {k: i[k[1]] if k[0] else next(left) for k in sorted(self.order)}
        return tuple(at[k] for k in self.order)

    def part(self, place: Index) -> Index:
        """The number of a chunk along every dimension of `over`."""
        at = dict(zip(self.order, place, strict=True))
        return tuple(at.get((False, d), ZERO) for d in range(len(self.size)))

    def element(self, place: Index, r: Index, fn: Fn) -> Expr:
        """fn(element r of a chunk), and 0 past the end of a dimension."""
        at = dict(zip(self.order, place, strict=True))
        row = tuple(at.get((True, d), ZERO) for d in range(len(self.sets.rows)))
        left = iter(r)
        own = [next(left) if n > 1 else ZERO for n in self.size]
        where = tuple(p * n + o for p, n, o in zip(self.part(place), self.size, own, strict=True))
        e = fn(self.sets.at(row, where))
        for d, extent in enumerate(self.sets.over):
            if self.count(d) * self.size[d] is not extent:
                e = masked(index(where[d], I64) < index(extent, I64), e, const(0, e.dtype))
        return e

    def number(self, place: Index) -> Expr:
        """The number of elements of a chunk."""
        left = zip(self.part(place), self.size, self.sets.over, strict=True)
        return count([minimum(Int(n), extent - p * n) for p, n, extent in left], self.sets.dtype)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Strides and extents of all dimensions with more than one index, the innermost first."""

    dims: tuple[Dim, ...]
    stride: dict[Dim, int]
    extent: dict[Dim, int]

    def follows(self, b: Dim, a: Dim) -> bool:
        """True if one step of b leads just past the last element of a."""
        return self.stride[b] == self.stride[a] * self.extent[a]

    def volume(self, dims: Iterable[Dim]) -> int:
        """The number of elements of some dimensions."""
        return math.prod(self.extent[d] for d in dims)

    def columns(self) -> tuple[Dim, ...]:
        """The contiguous dimensions that number sets or chunks."""
        first = self.dims[0]
        if not first[0]:
            tall = self.volume(d for d in self.dims[1:] if not d[0]) >= TALL
            beside = any(d[0] and self.follows(d, first) for d in self.dims[1:2])
            if not (tall and beside and self.extent[first] < SHORT):
                return ()
        found = [first]
        for d in self.dims[1:]:
            if not (d[0] and self.follows(d, found[-1])):
                break
            found.append(d)
        return tuple(found)

    def sizes(self, dims: Sequence[Dim], lanes: int) -> dict[Dim, int]:
        """Elements of a chunk along `dims`, innermost first, that fit in this many lanes.

        Dimensions that follow each other in memory share their lanes, a power of two.
        """
        size = dict.fromkeys(dims, 1)
        run = 1
        for k, d in enumerate(dims):
            if k and not self.follows(d, dims[k - 1]):
                lanes, run = lanes // power_of_two(run), 1
            most = lanes // run
            if self.extent[d] > most:
                size[d] = _even(self.extent[d], most, 1 if self.stride[d] > 1 else ALIGNED)
                break
            size[d] = self.extent[d]
            run *= self.extent[d]
        return size


def chunks_of(b: GraphBuilder, s: Sets) -> Chunks | None:
    """How to split GPU sets that are too long for registers; None for others.

    Only for known sizes, since a chunk's elements are lanes.
    """
    can = capabilities_of(s.x.device)
    m = _memory(b, s) if s.is_static and can.units else None
    # Reading fewer elements twice from cache takes less time than the launch of a second kernel.
    if m is None or m.volume(m.dims) < can.launch:
        return None
    columns = m.columns()
    panel, tile = min(can.panel, power_of_two(m.volume(columns))), can.held // 2
    wide = s.dtype is F64  # an element takes two registers
    reduced = [d for d in m.dims if not d[0]]
    of_rows = not columns or not columns[0][0]
    most = can.held if of_rows else tile // panel
    held = m.sizes(reduced, most >> wide)
    if all(n == m.extent[d] for d, n in held.items()) and not (
        columns and of_rows and m.extent[columns[0]] < RUN
    ):
        return None
    size: dict[Dim, int] = {}
    for part in COLUMNS if columns else ROWS:
        limit = (tile if columns else can.chunk) // part
        size = m.sizes([d for d in reduced if d not in columns], limit // panel >> wide)
        chunks = m.volume(m.dims) // math.prod(size.values())
        if chunks // (can.panel if columns else 1) >= can.programs // 2:
            break
    cut = [d for d in m.dims if d[0] or m.extent[d] > size.get(d, 1)]
    cut.sort(key=lambda d: -m.stride[d] * size.get(d, 1))
    return Chunks(s, tuple(size.get((False, d), 1) for d in range(len(s.over))), tuple(cut))


def _memory(b: GraphBuilder, s: Sets) -> _Memory | None:
    """The memory layout of sets of known sizes; None if sets overlap."""
    rows, over = axes_for(s.rows), axes_for(s.over, prefix="r")
    flat = b.flat(s.x, s.join(tuple(a.var for a in rows), tuple(a.var for a in over)))
    stride: dict[Dim, int] = {}
    extent: dict[Dim, int] = {}
    for is_row, axes in ((True, rows), (False, over)):
        for d, a in enumerate(axes):
            if a.extent is ONE:
                continue
            step, _ = affine_in(flat, a.var) or (ZERO, flat)
            if not isinstance(step, Int) or step.value <= 0 or not isinstance(a.extent, Int):
                return None
            stride[is_row, d], extent[is_row, d] = step.value, a.extent.value
    return _Memory(tuple(sorted(stride, key=lambda k: stride[k])), stride, extent)


def _even(n: int, most: int, unit: int) -> int:
    """The largest multiple of `unit` that divides n, at least about half of `most`; else `most`."""
    for parts in range(-(-n // most), 2 * n // most + 1):
        if n % parts == 0 and n // parts % unit == 0:
            return n // parts
    return most
