"""Treat the elements of long rows of odd length as one row, and test its last tile alone, on GPUs.

    for i in R: for j in N { y[N*i + j] = f(x[N*i + j], m[i]) }
    ==>  for b in ceil(N*R / T) : grid {
           if the tile lies in one row i {
             for k in T : lane { y[T*b + k] = f(x[T*b + k], m[i]) }
           } else {
             for part in rows of the tile : seq { for k in its elements : lane { .. } }
           }
         }

Rows of odd length do not start at multiples of 16 bytes, so their tiles are loaded and stored
element by element. Tiles of the flat row do start there: 8192 x 50257 bf16 minus a column takes 391
us, the same as a copy, and 477 us row by row; the gradient of cross-entropy 413 and 577.
"""

from __future__ import annotations

from lenz.ir.expr import loads_of
from lenz.ir.kernel import For, If, Stmt, Store, digits, position
from lenz.ir.tensor import Axis, axis
from lenz.schedule.cut import all_moved, nested
from lenz.schedule.legal import Group
from lenz.schedule.stages import Stages
from lenz.sym import Int, Sym, SymEnv, Var, ceildiv, maximum, minimum, product

# Bytes. Softmax over 8192 rows of 10001 bf16 takes 127 us, of 10002 or 10004 95, of 10008 96. One
# row has one tile of another kind: 2049 x 2047 bf16 take 18 us if every tile tests where it ends.
WORD, LONG_WORD = 4, 16


def flattened(g: Group, s: Stages, env: SymEnv, width: int) -> tuple[Stmt, ...] | None:
    """The loops over tiles of `width` elements; None if they gain nothing."""
    axes = g.domain.axes
    if not axes or (axes[-1].extent.lo or 0) < 8 * width:
        return None
    last, place, length = axes[-1], position(axes), env.hint(axes[-1].extent)
    moving: list[tuple[Sym, int]] = []  # offsets that move along the rows, with bytes
    for x in s.rows[0]:
        moving += [(e.attrs[1][0], e.dtype.bytes) for e in loads_of(x.value) if not e.args]
        if isinstance(x, Store) and not x.bound:
            moving.append((x.offset, x.value.dtype.bytes))
    moving = [(at, size) for at, size in moving if last.var in at.free_vars]
    flat = [size for at, size in moving if at is place]
    if all(size * (length & -length) >= (WORD if len(axes) > 1 else LONG_WORD) for size in flat):
        return None
    if 2 * sum(flat) <= sum(size for _, size in moving):
        return None
    total = product(a.extent for a in axes)
    block = axis("p0b", ceildiv(total, Int(width)))
    lane, first = Var("p0", 0, width - 1), block.var * width
    row, end = first // last.extent, minimum(first + width, total)
    # A partial last tile ends after all rows.
    last_row = (first + (width - 1)) // last.extent

    def lanes(row: Sym, start: Sym, count: Sym) -> tuple[Stmt, ...]:
        """The elements of one row that a tile holds, from position `start` of the flat row."""
        own = {**digits(axes[:-1], row), last.var: start + lane - last.extent * row}
        return nested((Axis(lane, count),), "lane", all_moved(s.rows[0], own))

    part = axis("part", (end - 1) // last.extent - row + 1)
    own = row + part.var
    start = maximum(first, last.extent * own)
    count = minimum(Int(width), minimum(end, last.extent * (own + 1)) - start)
    whole, ends = lanes(row, first, Int(width)), For(part, "seq", lanes(own, start, count))
    return nested((block,), "grid", (If(last_row, row + 1, whole, (ends,)),))
