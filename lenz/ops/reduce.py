"""The type rule of reductions."""

from __future__ import annotations

from lenz.ir.dtype import BOOL, I64, DType


def reduce_dtype(kind: str, dtype: DType) -> DType:
    """Type of the result of reducing values of `dtype`: positions are i64, any and all are bool."""
    if kind in ("argmax", "argmin"):
        return I64
    return BOOL if kind in ("any", "all") else dtype
