"""The dimensions of reductions: reduced and kept ones, and the indices of both."""

from __future__ import annotations

from collections.abc import Sequence

from lenz import ops
from lenz.ir.dtype import DType
from lenz.ir.expr import Expr, const, index
from lenz.ir.graph import ReduceKind
from lenz.ir.tensor import TensorType
from lenz.lower.builder import At, Fn, GraphBuilder, Index, Value
from lenz.records import dataclass
from lenz.sym import ONE, ZERO, Int, Sym, product


def wrapped(dim: int, rank: int) -> int:
    """A dimension counted from the front; a 0-d tensor counts as having one."""
    return dim % max(rank, 1)


@dataclass(frozen=True, slots=True)
class Split:
    """A shape, split into reduced dimensions (`reduced`, ascending) and the rest."""

    shape: tuple[Sym, ...]
    reduced: tuple[int, ...]

    @property
    def over(self) -> tuple[Sym, ...]:
        """Sizes of the reduced dimensions."""
        return tuple(self.shape[d] for d in self.reduced)

    @property
    def rows(self) -> tuple[Sym, ...]:
        """Sizes of the kept dimensions."""
        return tuple(s for d, s in enumerate(self.shape) if d not in self.reduced)

    @property
    def padded(self) -> tuple[Sym, ...]:
        """The shape with 1 for each reduced dimension (keepdim)."""
        return tuple(ONE if d in self.reduced else s for d, s in enumerate(self.shape))

    def row(self, i: Index) -> Index:
        """The row index within a full (or padded) index."""
        return tuple(v for d, v in enumerate(i) if d not in self.reduced)

    def pad(self, row: Index) -> Index:
        """The index of a row in a tensor of the padded shape."""
        kept = iter(row)
        return tuple(ZERO if d in self.reduced else next(kept) for d in range(len(self.shape)))

    def join(self, row: Index, r: Index) -> Index:
        """The full index of the element r of a row."""
        kept, taken = iter(row), iter(r)
        return tuple(
            next(taken) if d in self.reduced else next(kept) for d in range(len(self.shape))
        )


def cut(shape: tuple[Sym, ...], dim: int | Sequence[int] | None) -> Split:
    """Split a shape at one dimension, some, or all (None and the empty list mean all)."""
    rank = len(shape)
    if rank == 0:
        return Split(shape, ())
    chosen = (dim,) if isinstance(dim, int) else tuple(dim or ())
    taken = {wrapped(d, rank): None for d in chosen} if chosen else dict.fromkeys(range(rank))
    return Split(shape, tuple(sorted(taken)))


def common_shape(values: Sequence[Value]) -> tuple[Sym, ...]:
    """The shape that the values broadcast to; torch has checked that there is one."""
    rank = max(v.rank for v in values)
    shape: list[Sym] = [ONE] * rank
    for v in values:
        for d, size in enumerate(v.shape, start=rank - v.rank):
            if size is not ONE:
                shape[d] = size
    return tuple(shape)


def count(sizes: Sequence[Sym], dtype: DType) -> Expr:
    """The number of elements of a shape, as a value of the type."""
    n = product(sizes)
    return const(n.value, dtype) if isinstance(n, Int) else index(n, dtype)


def sum_rows(b: GraphBuilder, s: Split, fn: At, dtype: DType, name: str) -> Value:
    """The sum of each row of fn(full index), as an intermediate of this type."""
    return reduce_over(b, "sum", s, False, fn, None, b.temp(s.rows, dtype), name)


def reduce_over(
    b: GraphBuilder,
    kind: ReduceKind,
    s: Split,
    keepdim: bool,
    fn: At,
    finish: Fn | None = None,
    type: TensorType | None = None,
    name: str = "",
) -> Value:
    """Reduce fn(full index) over the reduced dimensions; the result has the rows or padded shape.

    With nothing to reduce (a 0-d tensor) it is a map: every row has one element.
    """
    if not s.over:

        def one(i: Index) -> Expr:
            e = ops.of_one(kind, fn(i))
            return e if finish is None else finish(e)

        return b.map(one, type, name)
    shape = s.padded if keepdim else s.rows

    def body(i: Index, r: Index) -> Expr:
        return fn(s.join(s.row(i) if keepdim else i, r))

    return b.reduce(kind, shape, s.over, body, finish, type, name)
