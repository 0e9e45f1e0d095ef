"""Names of element types, and constants, in Triton."""

from __future__ import annotations

import math

from lenz.ir.dtype import BOOL, F32, I32, DType

# The type in memory, as a signature writes it, and the type of values. A bool is a byte in memory.
_MEMORY = {
    "bool": "i8", "f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64",
    "f8e4m3fn": "fp8e4nv", "f8e5m2": "fp8e5",
}  # fmt: skip
_VALUE = {
    "bool": "int1", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
    "f8e4m3fn": "float8e4nv", "f8e5m2": "float8e5",
}  # fmt: skip


def memory_type(dtype: DType) -> str:
    """The type of an element in memory: "fp32", "i8" and so on."""
    return _MEMORY.get(dtype.name, dtype.name)


def value_type(dtype: DType) -> str:
    """The type of a value: "tl.float32", "tl.int1" and so on."""
    name = _VALUE.get(dtype.name)
    return f"tl.{name or dtype.name.replace('u', 'uint').replace('i', 'int', dtype.name[0] == 'i')}"


def constant(dtype: DType, value: bool | int | float) -> str:
    """A constant; types that Python's numbers do not stand for are spelled out."""
    if dtype is F32 and math.isfinite(value):
        return repr(float(value)) if value >= 0 and str(value)[0] != "-" else f"({float(value)!r})"
    if dtype is I32:
        return str(value) if value >= 0 else f"({value})"
    if dtype.is_float:
        text = repr(float(value)) if math.isfinite(value) else f'float("{value}")'
    else:
        text = repr(bool(value)) if dtype is BOOL else str(value)
    return f"tl.full([], {text}, {value_type(dtype)})"
