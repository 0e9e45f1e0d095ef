"""The masks of partial vectors, and stores of their lanes without any mask.

A mask that is known when the text is written has the form `<i1 true, ..., i1 false>`. If such a
mask has one lane set, LLVM 22 turns a masked store of truncated lanes into a scalar store of the
wide type, which writes past the element (docs/upstream/). Masks of many lanes are affected too:
vectors wider than a register are split, and one half may have a single lane set. So if the lanes
are known, elements that a truncation can produce use plain stores.

So do all others without AVX-512: on Zen 3, softmax of rows of 5 takes 21 ms with the masked stores
of AVX2, without 4.8. If their number is unknown, each of its bits is a branch: products of rows of
15 by a column take 1.0 of eager's time, with masked stores 1.24.
"""

from __future__ import annotations

from collections.abc import Sequence

from lenz.ir.dtype import F32, F64, I32, DType
from lenz.machine.cpu.llvm.function import Function
from lenz.machine.cpu.llvm.instructions import Names
from lenz.machine.cpu.llvm.scopes import Scopes, Tail, Value
from lenz.machine.cpu.llvm.types import memory_type, shuffle


def tail_mask(scopes: Scopes, left: Value) -> Tail:
    """The mask of the first `left` lanes, where `left` is an i64 of at least 1."""
    text, width = left.names[0], scopes.width
    if text[0] != "%":
        bits = ", ".join(f"i1 {'true' if i < int(text) else 'false'}" for i in range(width))
        return Tail((f"<{bits}>",), left.level, True, text)
    b = scopes.builder(left.level, True, 1)
    small = b.fn.let(left.level, f"trunc i64 {text} to i32")
    limit = scopes.spread(Value((small,), left.level), I32, True, 1)
    names = b.compare("icmp slt", I32, (scopes.lane_numbers("i32"),), limit)
    return Tail(names, left.level, True, text)


def store_tail(
    scopes: Scopes, dtype: DType, tail: Tail, reverse: bool, values: Names, pointers: Names
) -> bool:
    """Store the lanes of a tail without masks; False, and no store, where masks are better.

    Of eight lanes, the bits of the count say whether four, two, and one of them are left. With
    `reverse` the vectors are already reversed; the tail is not.
    """
    fn, level, width = scopes.fn, scopes.fn.level, scopes.width
    known, element = tail.count[0] != "%", memory_type(dtype)
    # Floats of 4 and 8 bytes do not come from a truncation.
    if fn.module.target.has("avx512f") and (not known or dtype in (F32, F64)):
        return False
    if reverse and not known:
        return False
    if reverse:
        first = width - int(tail.count)
        values = _lanes(fn, element, width, values, (*range(first, width), *range(first)))
        pointers = after(fn, level, element, pointers, str(first))
    while width > 1:
        size = width // 2
        low = _lanes(fn, element, width, values, range(size))
        if known and not int(tail.count) & size:
            values, width = low, size
            continue
        high = _lanes(fn, element, width, values, range(size, width))
        stores = [
            f"  store <{size} x {element}> {v}, ptr {p}, align {dtype.bytes}"
            for v, p in zip(low, pointers, strict=True)
        ]
        if known:
            fn.scopes[level].lines += stores
            values, pointers = high, after(fn, level, element, pointers, str(size))
        else:
            bit = fn.let(level, f"and i64 {tail.count}, {size}")
            some = fn.let(level, f"icmp ne i64 {bit}, 0")
            with scopes.when(some, []):
                fn.scopes[-1].lines += stores
            t = f"<{size} x {element}>"
            pairs = zip(high, low, strict=True)
            values = fn.lets(level, [f"select i1 {some}, {t} {h}, {t} {x}" for h, x in pairs])
            pointers = after(fn, level, element, pointers, bit)
        width = size
    return True


def _lanes(fn: Function, element: str, width: int, values: Names, lanes: Sequence[int]) -> Names:
    t = f"<{width} x {element}>"
    return fn.lets(fn.level, [shuffle(t, v, "poison", lanes) for v in values])


def after(fn: Function, level: int, element: str, pointers: Names, count: str) -> Names:
    """The addresses of elements behind others."""
    return fn.lets(level, [f"getelementptr {element}, ptr {p}, i64 {count}" for p in pointers])
