"""Lanes per axis of a tile, and its warps."""

from __future__ import annotations

import math

from lenz.ir.tensor import Axes, Axis
from lenz.machine.cuda.shape import Shape
from lenz.sym import SymEnv, Var
from lenz.sym.divide import power_of_two

# Lanes of one program run over at most this many axes, or more if these have only 64 elements.
# Triton's tensors may have more, but with worse layouts.
MOST_AXES = 3


def warps_of(area: int, each: int, shape: Shape) -> int:
    """Warps of a program that holds a tile of this many elements, `each` per thread."""
    least = 1 if area <= 256 or shape.thread or each >= 32 else 4
    return max(least, min(shape.warps, area // (32 * (shape.thread or each))))


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
        # Lanes beyond the end are idle: 768 elements are 3 tiles of 256, not one of 1024.
        while width > 128 and -(-n // width) * width > n + n // idle:
            width //= 2
        if width > 1:
            widths[a] = width
        budget //= width
    return widths
