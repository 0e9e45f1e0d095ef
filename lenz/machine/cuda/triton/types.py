"""Names of element types, and constants, in Triton."""

from __future__ import annotations

import math

from lenz.ir.dtype import BOOL, F32, FLOAT8, I32, I64, DType, short_float_bits
from lenz.ops.emission import triton_type

# The type in memory, as a signature writes it. Bools and 8-bit floats are bytes there.
_MEMORY = {
    "bool": "i8", "f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64",
    "f8e4m3fn": "u8", "f8e5m2": "u8",
}  # fmt: skip


def memory_type(dtype: DType) -> str:
    """The type of an element in memory: "fp32", "i8" and so on."""
    return _MEMORY.get(dtype.name, dtype.name)


def constant(dtype: DType, value: bool | int | float) -> str:
    """A constant; types and values that a Python number cannot express are written out."""
    if dtype in FLOAT8:
        return f"tl.full([], {short_float_bits(dtype, value)}, {triton_type(dtype)})"
    if dtype.is_float and value == 0 and math.copysign(1.0, value) < 0:
        # Triton turns every constant zero into +0.0.
        whole = I32 if dtype is F32 else I64
        if dtype.bytes == whole.bytes:
            least = constant(whole, -(1 << (whole.bits - 1)))
            return f"tl.cast({least}, {triton_type(dtype)}, bitcast=True)"
        return f"tl.cast({constant(F32, value)}, {triton_type(dtype)})"
    if dtype is F32 and (value == 0 or 2.0**-126 <= abs(value) < math.inf):
        return repr(float(value)) if value >= 0 else f"({float(value)!r})"
    if dtype is I32:
        return str(int(value)) if value >= 0 else f"({value})"
    if dtype.is_float:
        text = repr(float(value)) if math.isfinite(value) else f'float("{value}")'
    else:
        text = repr(bool(value)) if dtype is BOOL else str(value)
    return f"tl.full([], {text}, {triton_type(dtype)})"
