"""The masks of partial vectors, and stores of a constant number of lanes without any mask.

A mask that is known when the text is written has the form `<i1 true, ..., i1 false>`. If such a
mask has one lane set, LLVM 22 turns a masked store of truncated lanes into a scalar store of the
wide type, which writes past the element (docs/upstream/). Masks of many lanes are affected too:
vectors wider than a register are split, and one half may have a single lane set. So if the lanes
are known, elements that a truncation can produce use plain stores. So do all others without
AVX-512: on Zen 3, softmax of rows of 5 takes 21 ms with the masked stores of AVX2, without 4.8.
"""

from __future__ import annotations

from lenz.ir.dtype import F32, F64, I32, DType
from lenz.machine.cpu.llvm.function import Function
from lenz.machine.cpu.llvm.instructions import Names
from lenz.machine.cpu.llvm.scopes import Scopes, Value
from lenz.machine.cpu.llvm.types import memory_type, shuffle, vector


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


def pieces(first: int, count: int) -> list[tuple[int, int]]:
    """Lanes first to first + count - 1 as (start, size) with powers of two, the largest first."""
    found = []
    while count:
        size = 1 << (count.bit_length() - 1)
        found.append((first, size))
        first, count = first + size, count - size
    return found


def stores_plainly(dtype: DType) -> bool:
    """True for elements that may come from a truncation; floats of 4 and 8 bytes cannot."""
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
            part = fn.let(level, shuffle(whole, value, "poison", range(start, start + size)))
        place = fn.let(level, f"getelementptr {element}, ptr {at}, i64 {start}") if start else at
        fn.put(level, f"  store {vector(element, size)} {part}, ptr {place}, align {dtype.bytes}")


def store_tail(
    scopes: Scopes, dtype: DType, mask: str, reverse: bool, values: Names, pointers: Names
) -> bool:
    """Store the lanes of a mask that is known; False, and no store, for other masks.

    With `reverse` the vectors are already reversed; the mask is not.
    """
    if mask[0] != "<" or (scopes.fn.module.target.has("avx512f") and not stores_plainly(dtype)):
        return False
    count = mask.count("i1 true")
    first = scopes.width - count if reverse else 0
    for value, at in zip(values, pointers, strict=True):
        store_lanes(scopes.fn, scopes.fn.level, dtype, scopes.width, first, count, value, at)
    return True
