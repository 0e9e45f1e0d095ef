"""Windows over the last dimensions: of fixed size, or those of adaptive pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce

from lenz import ops
from lenz.ir.dtype import BOOL
from lenz.ir.expr import Expr, const, index, masked
from lenz.lower.builder import At, Decline, Index, Value
from lenz.records import dataclass
from lenz.sym import ONE, ZERO, Int, Sym, ceildiv, maximum, prove_le, prove_lt, sym

# A window with more elements is reduced in a loop, not unrolled.
WRITTEN_OUT = 32
UNKNOWN = 1 << 30  # assumed elements of a window of symbolic size

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
        """All places in a window, in row-major order."""
        return [tuple(map(Int, a)) for a in itertools.product(*map(range, self.kernel))]

    def place(self, o: Index, a: Offsets) -> Index:
        """The input position of place `a` of window `o`."""
        rows = zip(o, self.stride, self.padding, a, self.dilation, strict=True)
        return tuple(v * s - p + k * e for v, s, p, k, e in rows)

    def inside(self, o: Index, a: Offsets) -> Expr | None:
        """Whether that place is in the input; None if it always is."""
        conditions: list[Expr] = []
        for d, at in enumerate(self.place(o, a)):
            pad, step = self.padding[d], self.dilation[d]
            low, high = a[d].lo or 0, a[d].hi
            if low * step < pad:
                conditions.append(index(at) >= 0)
            # Without ceil_mode the last window ends within the padding on the right.
            if self.ceil or high is None or (self.kernel[d] - 1 - high) * step < pad:
                conditions.append(index(at) < index(self.sizes[d]))
        return reduce(ops.and_, conditions) if conditions else None

    def read(self, at: At, o: Index, a: Offsets, other: Expr) -> Expr:
        """The input at place `a` of window `o`, `other` outside."""
        value, inside = at(self.place(o, a)), self.inside(o, a)
        return value if inside is None else masked(inside, value, other)

    def covering(self, d: int) -> int:
        """The largest number of windows that contain an input position, along a dimension."""
        return (self.kernel[d] - 1) * self.dilation[d] // self.stride[d] + 1

    @property
    def over(self) -> tuple[Sym, ...]:
        """The sizes of one window."""
        return tuple(Int(k) for k in self.kernel)

    def first(self, o: Index) -> Index:
        """The first place of a window inside the input: the result if all elements are -inf."""
        found: list[Sym] = []
        for d, start in enumerate(self.place(o, (ZERO,) * self.rank)):
            step = self.dilation[d]
            found.append(start + ceildiv(maximum(-start, ZERO), Int(step)) * step)
        return tuple(found)

    def holders_along(self, d: int, h: Sym) -> list[tuple[Sym, Expr]]:
        """The windows that may contain position h of dimension d, with the condition for each."""
        found: list[tuple[Sym, Expr]] = []
        for back in range(self.covering(d)):
            o = (h + self.padding[d]) // self.stride[d] - back
            # The condition: h is before the window's end. By choice of o it is not before its
            # start.
            past = h + self.padding[d] - o * self.stride[d]
            width = Int((self.kernel[d] - 1) * self.dilation[d] + 1)
            found.append((o, _all_less((ZERO, o + 1), (o, self.outs[d]), (past, width))))
        return found

    def holders(self, h: Index) -> list[tuple[Index, Expr]]:
        """The windows that may contain a position, each with the condition that it does."""
        return [
            (tuple(o for o, _ in chosen), reduce(ops.and_, [there for _, there in chosen]))
            for chosen in itertools.product(*(self.holders_along(d, v) for d, v in enumerate(h)))
        ]


def _all_less(*pairs: tuple[Sym, Sym]) -> Expr:
    """Whether each number is less than its partner; pairs that sizes prove are left out."""
    unknown = [index(a) < index(b) for a, b in pairs if not prove_lt(a, b)]
    return reduce(ops.and_, unknown, const(True, BOOL))


@dataclass(frozen=True, slots=True)
class Adaptive(Windows):
    """Windows that divide n elements in m parts: o covers floor(o n/m) up to ceil((o + 1) n/m)."""

    widths: tuple[Sym, ...] = ()

    @property
    def area(self) -> int:
        """Elements of the largest window; too many to unroll if sizes are unknown."""
        return math.prod(self.kernel) if all(isinstance(k, Int) for k in self.widths) else UNKNOWN

    @property
    def over(self) -> tuple[Sym, ...]:
        """The sizes of the largest window."""
        return self.widths

    def ends(self, o: Sym, d: int) -> tuple[Sym, Sym]:
        """The first element of a window, and the one past its last."""
        n, m = self.sizes[d], self.outs[d]
        return (o * n) // m, ceildiv((o + 1) * n, m)

    def place(self, o: Index, a: Offsets) -> Index:
        """The input position of place `a` of window `o`."""
        return tuple(self.ends(o[d], d)[0] + a[d] for d in range(self.rank))

    def inside(self, o: Index, a: Offsets) -> Expr | None:
        """Whether that place is in the window; None if it always is."""
        conditions: list[Expr] = []
        for d in range(self.rank):
            start, end = self.ends(o[d], d)
            # The smallest window has floor(n / m) elements, rounded up; often all are equal.
            least = maximum(self.sizes[d] // self.outs[d], ONE)
            if not (prove_le(a[d] + 1, least) or prove_lt(start + a[d], end)):
                conditions.append(index(start + a[d]) < index(end))
        return reduce(ops.and_, conditions) if conditions else None

    def first(self, o: Index) -> Index:
        """The first place of a window."""
        return self.place(o, (ZERO,) * self.rank)

    def covering(self, d: int) -> int:
        """The largest number of windows that contain an input position, along a dimension."""
        n, m = self.sizes[d], self.outs[d]
        if (n // m) * m is n:
            return 1
        if not (isinstance(n, Int) and isinstance(m, Int)):
            return UNKNOWN
        return (m.value - 1) // n.value + (1 if m.value % n.value == 0 else 2)

    def holders_along(self, d: int, h: Sym) -> list[tuple[Sym, Expr]]:
        """The windows that contain position h of dimension d, with the condition for each."""
        n, m = self.sizes[d], self.outs[d]
        last = index(((h + 1) * m - 1) // n)
        found = [((h * m) // n, const(True, BOOL))]
        for up in range(1, self.covering(d)):
            o = (h * m) // n + up
            found.append((o, index(o) <= last))
        return found


def adaptive(x: Value, outs: Sequence[Sym | int]) -> Adaptive:
    """The windows of adaptive pooling; declines empty inputs and outputs."""
    sizes, parts = x.shape[x.rank - len(outs) :], tuple(sym(o) for o in outs)
    if any(s is ZERO for s in (*sizes, *parts)):
        raise Decline("adaptive pooling of or to no elements")
    widths = tuple(_widest(n, m) for n, m in zip(sizes, parts, strict=True))
    kernel = tuple(k.value if isinstance(k, Int) else 0 for k in widths)
    none, one = (0,) * len(outs), (1,) * len(outs)
    return Adaptive(kernel, one, none, one, sizes, parts, False, widths)


def _widest(n: Sym, m: Sym) -> Sym:
    """The size of the largest window of adaptive pooling, or an upper bound."""
    if isinstance(n, Int) and isinstance(m, Int):
        ends = (-((-(o + 1) * n.value) // m.value) - o * n.value // m.value for o in range(m.value))
        return Int(max(ends))
    return n // m if (n // m) * m is n else ceildiv(n, m) + 1


def windows(
    sizes: tuple[Sym, ...],
    outs: tuple[Sym, ...],
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil: bool = False,
) -> Windows:
    """Fill in defaults: one number for all dimensions, the stride from the kernel."""
    n = len(kernel) if len(kernel) > 1 else len(sizes)

    def full(v: int | Sequence[int]) -> tuple[int, ...]:
        t = (v,) if isinstance(v, int) else tuple(v)
        return t * n if len(t) == 1 else t

    numbers = full(kernel), full(stride or kernel), full(padding), full(dilation)
    return Windows(*numbers, sizes[-n:], outs[-n:], ceil)
