"""Shapes, layouts and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lenz.errors import InternalError
from lenz.ir.dtype import DType
from lenz.records import dataclass, field
from lenz.sym import ONE, ZERO, Int, Min, Sym, Var, affine_in, maximum, power_of_two, product


@dataclass(frozen=True, slots=True)
class Axis:
    """One loop axis: the variable runs over 0 <= var < extent.

    Lanes of a tile have a `width`, a power of two, and those below all of `ends` run: the extent is
    the minimum of all these. Without ends every lane runs, and the extent is the width.
    """

    var: Var
    extent: Sym
    width: int = 0
    ends: tuple[Sym, ...] = ()

    @property
    def name(self) -> str:
        """Name of the variable."""
        return self.var.name


def lane_axis(a: Axis) -> Axis:
    """The axis as lanes of the smallest tile that holds it."""
    if a.extent.hi is None:
        raise InternalError(f"lanes over {a.name}, which has no bound")
    width = power_of_two(a.extent.hi)
    ends = a.extent.args if isinstance(a.extent, Min) else (a.extent,)
    return Axis(a.var, a.extent, width, tuple([e for e in ends if e is not Int(width)]))


def axis(name: str, extent: Sym) -> Axis:
    """Make an axis whose variable knows its bounds, so that index rules can use them."""
    hi = None if extent.hi is None else max(extent.hi - 1, 0)
    return Axis(Var(name, 0, hi, None if isinstance(extent, Int) else extent), extent)


AXIS_NAMES = "ijklmnopqrstuvw"


def axes_for(shape: Sequence[Sym], prefix: str = "") -> tuple[Axis, ...]:
    """Axes for a shape, named i, j, k and so on to w, then z15, z16 and so on."""
    names = [*AXIS_NAMES, *(f"z{d}" for d in range(len(AXIS_NAMES), len(shape)))]
    return tuple([axis(prefix + name, x) for name, x in zip(names, shape, strict=False)])


Axes = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Element [i0, i1, ...] is at offset + sum(stride[d] * i[d]), in elements."""

    shape: tuple[Sym, ...]
    stride: tuple[Sym, ...]
    offset: Sym = ZERO

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.stride):
            raise ValueError(f"{len(self.shape)} sizes but {len(self.stride)} strides")

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def syms(self) -> tuple[Sym, ...]:
        """Sizes, strides and offset."""
        return (*self.shape, *self.stride, self.offset)

    @property
    def numel(self) -> Sym:
        """Number of elements."""
        return product(self.shape)

    def at(self, index: Sequence[Sym]) -> Sym:
        """Flat offset in elements of one index."""
        return sum((i * s for i, s in zip(index, self.stride, strict=True)), self.offset)

    @property
    def is_contiguous(self) -> bool:
        """True if the layout is row-major without gaps and starts at 0."""
        rows = zip(self.stride, contiguous_strides(self.shape), self.shape, strict=True)
        return self.offset is ZERO and all(a is b or size is ONE for a, b, size in rows)

    @property
    def storage(self) -> Sym:
        """Elements of storage from the base pointer to just after the last element."""
        if any(size is ZERO for size in self.shape):
            return ZERO
        return maximum(self.at([size - 1 for size in self.shape]) + 1, ZERO)

    def packed(self, shape: Sequence[Sym]) -> Layout:
        """A layout of `shape` without gaps, its dimensions in this layout's order.

        Row-major if the strides do not tell the order.
        """
        steps = {d: s.value for d, s in enumerate(self.stride) if isinstance(s, Int)}
        is_told = len(set(steps.values())) == self.rank
        order = sorted(range(self.rank), key=lambda d: -steps[d] if is_told else d)
        strides = contiguous_strides([shape[d] for d in order])
        return Layout(tuple(shape), tuple(strides[order.index(d)] for d in range(self.rank)))


def contiguous_strides(shape: Sequence[Sym]) -> tuple[Sym, ...]:
    """Row-major strides in elements, as torch makes them (sizes 0 count as 1)."""
    strides: list[Sym] = []
    step: Sym = ONE
    for size in reversed(shape):
        strides.append(step)
        step = step * (ONE if size is ZERO else size)
    return tuple(reversed(strides))


def contiguous(shape: Sequence[Sym]) -> Layout:
    """The row-major layout of a shape."""
    return Layout(tuple(shape), contiguous_strides(shape))


def strided(axes: tuple[Axis, ...], flat: Sym) -> Layout | None:
    """The layout whose element [axes] is at `flat`; None if `flat` is not affine in them."""
    strides: list[Sym] = []
    rest = flat
    for a in axes:
        parts = affine_in(rest, a.var)
        if parts is None:
            return None
        strides.append(parts[0])
        rest = parts[1]
    own = {a.var for a in axes}
    if any(v in own for s in (*strides, rest) for v in s.free_vars):
        return None
    return Layout(tuple(a.extent for a in axes), tuple(strides), rest)


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type, device ("cpu", "cuda:0", ...) and layout of one tensor."""

    dtype: DType
    device: str
    layout: Layout

    @property
    def shape(self) -> tuple[Sym, ...]:
        """Sizes."""
        return self.layout.shape

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return self.layout.rank

    @property
    def nbytes(self) -> Sym:
        """Bytes of its memory."""
        return self.layout.storage * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named tensor. `origin` names the FX nodes it came from and the user's file:line."""

    SYNTAX: ClassVar = ("{name:def} : {type:type}",)
    name: str
    type: TensorType
    origin: tuple[str, ...] = field(default=(), compare=False)

    @property
    def shape(self) -> tuple[Sym, ...]:
        """Sizes."""
        return self.type.layout.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.type.dtype
