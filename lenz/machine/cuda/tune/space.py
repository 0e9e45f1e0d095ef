"""The shapes to measure for a kernel, besides the cost model's."""

from __future__ import annotations

from collections.abc import Sequence

from lenz.ir.kernel import KernelKind
from lenz.machine.cuda.capabilities import CAN
from lenz.machine.cuda.shape import Shape
from lenz.sym import power_of_two


def space(kind: KernelKind, rows: int, length: int) -> tuple[Shape, ...]:
    """At most 13 shapes for a kernel over `rows` elements of P and `length` of R; no two are equal.

    Some may give the same kernel, such as tiles larger than the whole tensor.
    """
    if kind == "pointwise":
        return tuple(_warped(t, w, tile=t) for t in (512, 1024, 2048, 4096) for w in (4, 8))
    if kind == "transpose":
        pairs = ((32, 4), (32, 8), (64, 4), (64, 8), (64, 16), (128, 8), (128, 16), (128, 32))
        return tuple(_warped(e * e, w, edge=e) for e, w in pairs)
    if kind == "split_scan":
        parts = ((1024, 2), (2048, 2), (2048, 4), (4096, 4), (8192, 2), (8192, 8), (16384, 8))
        return tuple(_warped(p, w, part=p) for p, w in parts)
    return _panels(rows, length) if kind == "outer_reduction" else _rows(power_of_two(length))


def _warped(area: int, warps: int, **widths: int) -> Shape:
    """A shape whose tile of `area` elements has this many warps."""
    return Shape(**widths, thread=max(1, area // (32 * warps)), warps=warps)


def _panels(columns: int, length: int) -> tuple[Shape, ...]:
    """Panels of columns: 16 bytes to 512, with tiles of 2 to 8 thousand elements, or looped."""
    widths = (32, 64, 128, 256) if columns >= 4096 else (8, 16, 32, 64)
    pairs = [(p, t) for p in widths for t in (2048, 4096, 8192)]
    made = [Shape(panel=p, narrow=p, rows=t, chunk=t) for p, t in pairs]
    if length * widths[0] <= CAN.held:  # otherwise no tile holds all rows, and all of them loop
        made.append(Shape(row=0))
    return tuple(made)


def _rows(n: int) -> tuple[Shape, ...]:
    """Rows of up to n elements, a power of two: several per program, one, or part of one."""
    if n <= 1024:
        return tuple(Shape(rows=a, thread=t) for a in (1024, 2048, 4096, 8192) for t in (8, 16, 32))
    pairs = [(c, s) for c in (4096, 8192, 16384) for s in (1, 2, 3)]
    looped = [Shape(row=n // 2, chunk=c, idle=2, stages=s) for c, s in pairs]
    if n > CAN.held:
        return (*looped, Shape(row=n // 2, chunk=2048, stages=3), *_held(65536, (32,)))
    made = _held(n, [w for w in (1, 2, 4, 8, 16, 32) if 4 <= n // (32 * w) <= 128])
    if n <= 4096:
        made += [Shape(rows=m * n, thread=t) for m in (2, 4) for t in (16, 32)]
    elif n > 8192:
        made += [x for x in looped if x.chunk < n and x.stages != 2]
    return tuple(made)


def _held(n: int, warps: Sequence[int]) -> list[Shape]:
    """One row in the registers of a program."""
    return [_warped(n, w, row=max(n, CAN.held), rows=n) for w in warps]
