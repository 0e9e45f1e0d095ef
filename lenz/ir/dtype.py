"""Element types: their names in the text form, their widths, and the map to and from torch.

Invariant: one `DType` object per element type, so `is` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from lenz.records import dataclass

Kind = Literal["bool", "uint", "int", "float", "complex"]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type; `bytes` is the size of an element in memory."""

    name: str
    kind: Kind
    bytes: int
    torch: torch.dtype

    @property
    def bits(self) -> int:
        """Width of one element in bits."""
        return 8 * self.bytes

    @property
    def is_float(self) -> bool:
        """True for real floating-point types."""
        return self.kind == "float"

    @property
    def is_complex(self) -> bool:
        """True for complex types."""
        return self.kind == "complex"

    @property
    def is_integer(self) -> bool:
        """True for signed and unsigned integers; bool is not one."""
        return self.kind in ("int", "uint")

    @property
    def is_half(self) -> bool:
        """True for bf16 and fp16, which are computed in f32 and rounded when stored."""
        return self.name in ("f16", "bf16")

    def holds(self, low: float, high: float) -> bool:
        """True if every integer from low to high is exact in this type; not for complex types."""
        if self.is_float:
            return max(-low, high) <= 2 / torch.finfo(self.torch).eps
        bits = 1 if self.kind == "bool" else self.bits - (self.kind == "int")
        return low >= (-(1 << bits) if self.kind == "int" else 0) and high < 1 << bits

    def __repr__(self) -> str:
        return self.name


BOOL = DType("bool", "bool", 1, torch.bool)
U8 = DType("u8", "uint", 1, torch.uint8)
U16 = DType("u16", "uint", 2, torch.uint16)
U32 = DType("u32", "uint", 4, torch.uint32)
U64 = DType("u64", "uint", 8, torch.uint64)
I8 = DType("i8", "int", 1, torch.int8)
I16 = DType("i16", "int", 2, torch.int16)
I32 = DType("i32", "int", 4, torch.int32)
I64 = DType("i64", "int", 8, torch.int64)
F16 = DType("f16", "float", 2, torch.float16)
BF16 = DType("bf16", "float", 2, torch.bfloat16)
F32 = DType("f32", "float", 4, torch.float32)
F64 = DType("f64", "float", 8, torch.float64)
C32 = DType("c32", "complex", 4, torch.complex32)
C64 = DType("c64", "complex", 8, torch.complex64)
C128 = DType("c128", "complex", 16, torch.complex128)
F8E4M3FN = DType("f8e4m3fn", "float", 1, torch.float8_e4m3fn)
F8E5M2 = DType("f8e5m2", "float", 1, torch.float8_e5m2)
F8E4M3FNUZ = DType("f8e4m3fnuz", "float", 1, torch.float8_e4m3fnuz)
F8E5M2FNUZ = DType("f8e5m2fnuz", "float", 1, torch.float8_e5m2fnuz)

# Types in which scalar expressions compute.
NATIVE: tuple[DType, ...] = (BOOL, U8, U16, U32, U64, I8, I16, I32, I64, F16, BF16, F32, F64)
# As in eager, loops do no arithmetic on 8-bit floats: they load, store, select and convert them.
FLOAT8: tuple[DType, ...] = (F8E4M3FN, F8E5M2)
# Types that loops may move; tensors of any other type pass through `Extern` only.
MOVED: tuple[DType, ...] = (*NATIVE, *FLOAT8)
DTYPES: tuple[DType, ...] = (*NATIVE, C32, C64, C128, *FLOAT8, F8E4M3FNUZ, F8E5M2FNUZ)
BY_NAME: Mapping[str, DType] = {d.name: d for d in DTYPES}
_BY_TORCH = {d.torch: d for d in DTYPES}


def dtype_of(dtype: torch.dtype) -> DType | None:
    """Return the type of a torch dtype, or None for an unknown one (quantized types)."""
    return _BY_TORCH.get(dtype)


def short_float_bits(d: DType, value: float) -> int:
    """The bits of a number rounded to a float type of 8 or 16 bits as in torch: through f32."""
    word = torch.uint8 if d.bytes == 1 else torch.uint16
    return int(torch.tensor(value, dtype=torch.float32).to(d.torch).view(word))


def compute_dtype(d: DType) -> DType:
    """The type for arithmetic on `d`: f32 for bf16 and fp16, `d` itself otherwise."""
    return F32 if d.is_half else d
