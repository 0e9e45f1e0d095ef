"""Lanes per axis of a tile, and the order of programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from lenz.ir.dtype import DType
from lenz.ir.expr import Expr, is_bound_var, vars_of
from lenz.ir.kernel import digits
from lenz.ir.tensor import Axes, Axis, axis
from lenz.machine.cuda.capabilities import CAN
from lenz.schedule.cut import cut_all
from lenz.sym import ONE, Int, Sym, SymEnv, Var, product, step_of, substitute
from lenz.sym.divide import power_of_two

# Lanes of one program run over at most this many axes, or more if these have only 64 elements.
# Triton's tensors may have more, but with worse layouts.
MOST_AXES = 3
# The offset that a loop reads or writes, its computed indices, and the type of the element.
Visit: TypeAlias = tuple[Sym, Sequence[Expr], DType]


def area_of(widths: dict[Axis, int]) -> int:
    return math.prod(widths.values())


def length_of(a: Axis, env: SymEnv) -> int:
    """Elements of an axis: its bound, or the likely number."""
    return a.extent.hi if a.extent.hi is not None else max(env.hint(a.extent), 1)


def room_of(place: Var, env: SymEnv) -> int:
    """The number of values that a computed place may have, or the likely number."""
    return (place.hi or 0) + 1 if place.below is None else env.hint(place.below)


def widths_in(axes: Axes, budget: int, env: SymEnv, idle: int = 8) -> dict[Axis, int]:
    """Lanes per axis, from the innermost outwards, until a tile has `budget` elements."""
    widths: dict[Axis, int] = {}
    for a in reversed(axes):
        if budget <= 1 or (len(widths) >= MOST_AXES and area_of(widths) > 64):
            break
        n = length_of(a, env)
        width = min(power_of_two(n), budget)
        # Lanes beyond the end are idle: 768 elements are 3 tiles of 256, not one of 1024. Rows of
        # 150 have one of 256: to pad them takes 21.0 us so, in two of 128 22.6.
        if -(-n // width) * width > n + n // idle:
            tiles = [w for w in (width >> k for k in range(9)) if w >= min(128, width)]
            width = min(tiles, key=lambda w: (max(-(-n // w) * w, n + n // idle), -w))
        if width > 1:
            widths[a] = width
        budget //= width
    return widths


def by_parts(
    grid: list[Axis], visits: Sequence[Visit], axes: Axes, widths: dict[Axis, int], env: SymEnv
) -> list[Axis]:
    """The grid with the parts of rows outermost, if elements of a large table are visited again.

    A part of all its rows stays in the cache. Row by row, 4096 rows of 65536 f32 of a table of 64
    take 353 us, by parts 284; 2^24 f32 of any row of 4096 276 and 159, and sums at such places 604
    and 270.
    """
    for place, indices, dtype in visits:
        rows = math.prod(room_of(v, env) for v in filter(is_bound_var, place.free_vars))
        found = math.prod(env.hint(a.extent) for a in axes if a.var in vars_of(*indices))
        if found > rows and step_of(place, axes[-1].var) is ONE:
            length = length_of(axes[-1], env)
            if length > widths.get(axes[-1], 1) and 8 * rows * length * dtype.bytes > CAN.cache:
                return [*grid[-1:], *grid[:-1]]
    return grid


def cut_lanes(
    axes: Axes, widths: dict[Axis, int], in_line: bool, env: SymEnv
) -> tuple[list[Axis], list[Axis], dict[Var, Sym]]:
    """Blocks, lanes and positions of axes; a tile of several axes may be one line of lanes.

    Triton 3.6 lets the threads of a tile run down its columns wherever an access is not contiguous,
    so that a warp touches 32 rows.
    """
    own: dict[Var, Sym] = {}
    rows = axes[axes.index([*widths][-1]) :] if in_line and len(widths) > 1 else ()
    # The bounds of a quotient by an unknown length are lost, so that indices have 64 bits: a
    # strided load takes 73 instructions and a call per element, and 14 if the length is known.
    if rows and all(isinstance(a.extent, Int) for a in rows[1:]):
        budget = area_of(widths)
        line = axis(rows[0].name, product(a.extent for a in rows))
        axes, own = (*axes[: -len(rows)], line), digits(rows, line.var)
        # A third of the lanes may be idle: 28 x 28 pixels in 7 tiles of 128, one per thread, took
        # 37 us, and 24 in tiles of rows and columns.
        widths = widths_in((line,), budget, env, idle=3)
    at: dict[Var, Sym] = {}
    grid, lanes = cut_all(axes, widths, at)
    return grid, lanes, at | {v: substitute(x, at) for v, x in own.items()}
