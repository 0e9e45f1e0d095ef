"""LLVM's names of element types and constants.

A bool is `i1` as a value and `i8` in memory. bf16 and fp16 are `i16` in both places, because
arithmetic on them is done in f32 and only conversions look inside. 8-bit floats are `i8` for the
same reason.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from typing import Any

from lenz.errors import InternalError
from lenz.ir.dtype import DType, short_float_bits

VALUE = {
    "bool": "i1", "u8": "i8", "u16": "i16", "u32": "i32", "u64": "i64", "i8": "i8", "i16": "i16",
    "i32": "i32", "i64": "i64", "f16": "i16", "bf16": "i16", "f32": "float", "f64": "double",
    "f8e4m3fn": "i8", "f8e5m2": "i8",
}  # fmt: skip
# The suffix of a type in the name of an overloaded intrinsic, where it is not its name.
SUFFIX = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}


def value_type(dtype: DType, lanes: int = 1) -> str:
    """The type of a value; raises InternalError for a type that kernels cannot compute with."""
    found = VALUE.get(dtype.name)
    if found is None:
        raise InternalError(f"no LLVM type for {dtype}")
    return vector(found, lanes)


def memory_type(dtype: DType, lanes: int = 1) -> str:
    """The type of an element in memory."""
    return vector("i8" if dtype.name == "bool" else VALUE[dtype.name], lanes)


def vector(element: str, lanes: int) -> str:
    """The vector type of an element type (the element itself for one lane)."""
    return element if lanes == 1 else f"<{lanes} x {element}>"


def shuffle(t: str, x: str, y: str, lanes: Iterable[int]) -> str:
    """An instruction that picks lanes of two vectors; those of `y` count on from those of `x`."""
    order = [f"i32 {i}" for i in lanes]
    return f"shufflevector {t} {x}, {t} {y}, <{len(order)} x i32> <{', '.join(order)}>"


def suffix(element: str, lanes: int) -> str:
    """The overload suffix of an intrinsic, e.g. v16f32."""
    return f"v{lanes}" * (lanes > 1) + SUFFIX.get(element, element)


def constant(dtype: DType, value: Any) -> str:
    """The text of a scalar constant of the type."""
    if dtype.name == "bool":
        return "true" if value else "false"
    if dtype.name == "f32":
        # Infinite out of f32's range, as by a cast.
        return f"0x{_double_bits(ctypes.c_float(value).value):016X}"
    if dtype.name == "f64":
        return f"0x{_double_bits(float(value)):016X}"
    return str(short_float_bits(dtype, value) if dtype.is_float else int(value))


def _double_bits(x: float) -> int:
    return int.from_bytes(struct.pack(">d", x), "big")


def iota(element: str, lanes: int, step: int = 1, start: int = 0) -> str:
    """The constant vector start, start + step, ..."""
    if lanes == 1:
        return str(start)
    return "<" + ", ".join(f"{element} {start + step * i}" for i in range(lanes)) + ">"


def splat(element: str, text: str, lanes: int) -> str:
    """A scalar constant in every lane."""
    return text if lanes == 1 else f"splat ({element} {text})"
