"""Accumulation in Triton: the functions that combine two partial results.

NaN counts as the greatest value of max and argmax and the smallest of min and argmin; of equal
values the first position wins.
"""

from __future__ import annotations

from lenz.ir.dtype import BOOL, F32, I32, DType
from lenz.ir.graph import ReduceKind, ScanKind

# Helper functions by name; a kernel's module contains those that it uses.
COMBINE = {
    "add": "def add(x, y):\n    return x + y",
    "mul": "def mul(x, y):\n    return x * y",
    "greatest": (
        "def greatest(x, y):\n    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)"
    ),
    "least": "def least(x, y):\n    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)",
    "logaddexp": (
        "def logaddexp(x, y):\n"
        "    high = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)\n"
        "    low = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)\n"
        "    more = tl.exp(low - high)\n"
        "    one = 1.0 + more  # log1p, after Kahan: what rounding has done to the sum is undone\n"
        "    exact = tl.log(one) * (more / tl.where(one == 1.0, 1.0, one - 1.0))\n"
        "    both = high + tl.where(one == 1.0, more, exact)\n"
        "    return tl.where((low == high) & (high - high != 0.0), high, both)"
    ),
}
# The atomic update of a scatter, by mode.
UPDATES = {"add": "tl.atomic_add", "max": "tl.atomic_max", "min": "tl.atomic_min"}
_NAMES: dict[ReduceKind | ScanKind, str] = {
    "sum": "add", "prod": "mul", "max": "greatest", "min": "least", "any": "greatest",
    "all": "least", "argmax": "greatest", "argmin": "least", "logaddexp": "logaddexp",
}  # fmt: skip


def is_arg(kind: ReduceKind) -> bool:
    """True for the kinds that give a position."""
    return kind in ("argmax", "argmin")


def state_dtype(dtype: DType) -> DType:
    """The accumulator's type: f32 for halves, 32 bits for short integers."""
    if dtype.is_half:
        return F32
    return I32 if dtype is BOOL or (not dtype.is_float and dtype.bits < 32) else dtype


def combine_name(kind: ReduceKind | ScanKind, dtype: DType) -> str:
    """The function that combines two values of the kind; for bools + is or, and * is and."""
    if dtype is BOOL and kind in ("sum", "prod"):
        return "greatest" if kind == "sum" else "least"
    return _NAMES[kind]
