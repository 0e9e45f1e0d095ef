"""Vectors along the rows of a tile, transposed in registers to vectors along its lanes."""

from __future__ import annotations

from collections.abc import Sequence

from lenz.ir.dtype import DType
from lenz.ir.expr import Expr, vars_of
from lenz.machine.cpu.llvm.instructions import Names
from lenz.machine.cpu.llvm.scopes import Scopes
from lenz.machine.cpu.llvm.types import memory_type, shuffle
from lenz.sym import ONE, Int, Var, step_of


def is_transposed(e: Expr, row: Var, lane: Var) -> bool:
    """True for a load that is contiguous in the rows, and strided or gathered in the lanes."""
    offset, inside = e.attrs[1][0], vars_of(*e.args)
    if step_of(offset, row) is not ONE or row in inside:
        return False
    step = step_of(offset, lane)
    return lane in inside or not (isinstance(step, Int) and step.value in (-1, 0, 1))


def load_transposed(scopes: Scopes, pointers: Sequence[Sequence[str]], dtype: DType) -> Names:
    """Vectors along the lanes, one per row; a vector of rows starts at pointers[block][lane]."""
    fn, width, level = scopes.fn, scopes.width, scopes.fn.level
    rows: list[str] = []
    for block in pointers:
        n = min(width, scopes.copies - len(rows))
        t, wide = memory_type(dtype, n), [min(k, n - 1) for k in range(width)]
        read = fn.lets(level, (f"load {t}, ptr {p}, align {dtype.bytes}" for p in block))
        read = fn.lets(level, (shuffle(t, x, "poison", wide) for x in read)) if n < width else read
        rows += transpose(scopes, read, memory_type(dtype, width))[:n]
    return tuple(rows)


def transpose(scopes: Scopes, vectors: Sequence[str], t: str) -> Sequence[str]:
    """Transpose a square of `width` vectors: swap blocks of half the size, and so on down to 1."""
    fn, width = scopes.fn, scopes.width
    half = width // 2
    while half:
        low = [i if not i & half else width + i - half for i in range(width)]
        high = [i + half if not i & half else width + i for i in range(width)]
        new = list(vectors)
        for i in range(width):
            if not i & half:
                x, y = vectors[i], vectors[i + half]
                new[i] = fn.let(fn.level, shuffle(t, x, y, low))
                new[i + half] = fn.let(fn.level, shuffle(t, x, y, high))
        vectors = new
        half //= 2
    return vectors
