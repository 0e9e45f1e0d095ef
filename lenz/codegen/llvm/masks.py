"""The masks of partial vectors, and stores of a constant number of lanes without any mask.

A mask that is known when the text is written has the form `<i1 true, ..., i1 false>`. LLVM 22 turns
a masked store of truncated lanes whose constant mask has one lane set into a scalar store of the
type before the truncation, which writes past the element (docs/upstream/). Masks of many lanes are
no better off: vectors wider than a register are split, and a half may have one lane set. So where
the lanes are known, elements that a truncation can give are stored by plain stores instead.
"""

from __future__ import annotations

from lenz.codegen.llvm.builder import Names
from lenz.codegen.llvm.function import Function
from lenz.codegen.llvm.scopes import Scopes, Value
from lenz.codegen.llvm.types import memory_type, vector
from lenz.ir.dtype import F32, F64, I32, DType


def tail_mask(scopes: Scopes, left: Value) -> Value:
    """The mask of the first `left` lanes, where `left` is an i64 of at least 1."""
    text = left.names[0]
    width = scopes.width
    if text[0] != "%":
        bits = ", ".join(f"i1 {'true' if i < int(text) else 'false'}" for i in range(width))
        return Value((f"<{bits}>",), left.level, True)
    b = scopes.builder(left.level, True, 1)
    small = b.fn.let(left.level, f"trunc i64 {text} to i32")
    limit = scopes.spread(Value((small,), left.level), I32, True, 1)
    numbers = (scopes.lane_numbers("i32"),)
    return Value(b.compare("icmp slt", I32, numbers, limit), left.level, True)


def constant_lanes(mask: str) -> int | None:
    """How many lanes a mask has set, first lane first; None if that is not known here."""
    return mask.count("i1 true") if mask[0] == "<" else None


def pieces(first: int, count: int) -> list[tuple[int, int]]:
    """Lanes first to first + count - 1 as (start, size) of powers of two, the greatest first."""
    found = []
    while count:
        size = 1 << (count.bit_length() - 1)
        found.append((first, size))
        first, count = first + size, count - size
    return found


def stores_plainly(dtype: DType) -> bool:
    """True for elements that may come from a truncation; floats of 4 and 8 bytes never do."""
    return dtype not in (F32, F64)


def store_lanes(
    fn: Function, level: int, dtype: DType, width: int, first: int, count: int, value: str, at: str
) -> None:
    """Store lanes first to first + count - 1 of a vector whose lane 0 belongs at the address."""
    element, whole = memory_type(dtype), memory_type(dtype, width)
    for start, size in pieces(first, count):
        if size == 1:
            part = fn.let(level, f"extractelement {whole} {value}, i32 {start}")
        elif size == width:
            part = value
        else:
            order = ", ".join(f"i32 {start + i}" for i in range(size))
            text = f"shufflevector {whole} {value}, {whole} poison, <{size} x i32> <{order}>"
            part = fn.let(level, text)
        place = fn.let(level, f"getelementptr {element}, ptr {at}, i64 {start}") if start else at
        fn.put(level, f"  store {vector(element, size)} {part}, ptr {place}, align {dtype.bytes}")


def store_tail(
    scopes: Scopes, dtype: DType, mask: str, reverse: bool, values: Names, pointers: Names
) -> bool:
    """Store what a mask of known lanes lets through; False, and nothing done, for other masks.

    With `reverse` the vectors are reversed already, and the mask is not.
    """
    count = constant_lanes(mask)
    if count is None or not stores_plainly(dtype):
        return False
    first = scopes.width - count if reverse else 0
    for value, at in zip(values, pointers, strict=True):
        level = scopes.fn.level
        store_lanes(scopes.fn, level, dtype, scopes.width, first, count, value, at)
    return True
