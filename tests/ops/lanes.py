"""The builder protocol of `lenz/ops/emission.py` over NumPy arrays: LLVM forms run without LLVM.

Instructions do what LLVM defines; where LLVM leaves the result open (poison), an assertion fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lenz.ir.dtype import BOOL, FLOAT8, DType, short_float_bits

_FLOAT = {
    "fadd": np.add, "fsub": np.subtract, "fmul": np.multiply, "fdiv": np.divide,
}  # fmt: skip
_INTRINSICS = {
    "llvm.sqrt": np.sqrt, "llvm.floor": np.floor, "llvm.ceil": np.ceil, "llvm.trunc": np.trunc,
    "llvm.roundeven": np.rint, "llvm.fabs": np.abs, "llvm.copysign": np.copysign,
}  # fmt: skip
_BITS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
_ORDERS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip


def _numpy(d: DType) -> Any:
    if d in FLOAT8:
        return np.uint8
    return np.uint16 if d.name == "bf16" else torch.empty(0, dtype=d.torch).numpy().dtype


def _unsigned(x: Any) -> Any:
    return x.view(f"u{x.dtype.itemsize}") if x.dtype.kind == "i" else x


def _signed(x: Any) -> Any:
    return x.view(f"i{x.dtype.itemsize}") if x.dtype.kind == "u" else x


class Lanes:
    """Values are arrays; integers have no sign of their own, as in LLVM."""

    def __init__(self, count: int, features: tuple[str, ...] = ()) -> None:
        self.count = count
        self.features = features

    def binary(self, opcode: str, dtype: DType, x: Any, y: Any) -> Any:
        """One instruction; division as the builder in codegen defines it."""
        y = self.operand(dtype, y)
        assert x.dtype.itemsize == y.dtype.itemsize == _numpy(dtype).itemsize
        with np.errstate(all="ignore"):
            if opcode in _FLOAT:
                return _FLOAT[opcode](x, y)
            if opcode in _BITS:
                return _BITS[opcode](_unsigned(x), _unsigned(y))
            if opcode in ("shl", "lshr", "ashr"):
                assert np.all(_unsigned(y) < dtype.bits), "poison shift"
                if opcode == "shl":
                    return np.left_shift(_unsigned(x), _unsigned(y))
                as_kind = _signed if opcode == "ashr" else _unsigned
                return np.right_shift(as_kind(x), as_kind(y))
            return self._divide(opcode, x, y)

    def operand(self, dtype: DType, y: Any) -> Any:
        """A value as it is, a number as a constant."""
        return self.constant(dtype, y) if isinstance(y, int | float) else y

    def _divide(self, opcode: str, x: Any, y: Any) -> Any:
        signed = opcode[0] == "s"
        x, y = (_signed(x), _signed(y)) if signed else (_unsigned(x), _unsigned(y))
        minus = (y == -1) if signed else np.zeros(y.shape, dtype=bool)
        safe = np.where((y == 0) | minus, np.ones_like(y), y)
        rest = np.fmod(x, safe)
        if opcode.endswith("rem"):
            return rest
        return np.where(minus, (0 - x).astype(x.dtype), (x - rest) // safe)

    def compare(self, pred: str, operand_dtype: DType, x: Any, y: Any) -> Any:
        """One comparison."""
        y = self.operand(operand_dtype, y)
        kind, code = pred.split(" ")
        if kind == "fcmp":
            assert operand_dtype.is_float
            if code == "uno":
                return np.isnan(x) | np.isnan(y)
            assert code[0] == "o" or code == "une"
            return _ORDERS[code[1:]](x, y)
        assert not operand_dtype.is_float
        if code not in ("eq", "ne"):
            as_kind = _unsigned if code[0] == "u" else _signed
            return _ORDERS[code[1:]](as_kind(x), as_kind(y))
        return _ORDERS[code](_unsigned(x), _unsigned(y))

    def select(self, cond: Any, dtype: DType, x: Any, y: Any) -> Any:
        """One select."""
        assert cond.dtype == bool and x.dtype.itemsize == y.dtype.itemsize
        return np.where(cond, x, y.view(x.dtype))

    def intrinsic(self, name: str, dtype: DType, *xs: Any) -> Any:
        """One call of an intrinsic."""
        with np.errstate(all="ignore"):
            if name == "llvm.fma":
                from lenz.ops.reference import fma

                return fma(*[torch.from_numpy(np.ascontiguousarray(x)) for x in xs]).numpy()
            if name == "lenz.scalef":
                return np.ldexp(xs[0], np.nan_to_num(np.floor(xs[1])).astype(np.int32))
            if name in ("lenz.mul_high", "lenz.mul_low"):
                product = np.multiply(_unsigned(xs[0]), _unsigned(xs[1]), dtype=np.uint64)
                part = np.uint64(32 if name == "lenz.mul_high" else 0)
                return (product >> part).astype(np.uint32)
            if name == "llvm.ldexp":
                return np.ldexp(xs[0], _signed(xs[1]))
            return _INTRINSICS[name](*xs)

    def convert(self, opcode: str, to_dtype: DType, from_dtype: DType, x: Any) -> Any:
        """One conversion."""
        to = _numpy(to_dtype)
        with np.errstate(all="ignore"):
            match opcode:
                case "half_to_f32":
                    return torch.from_numpy(x).view(from_dtype.torch).float().numpy()
                case "f32_to_half":
                    assert x.dtype == np.float32
                    half = torch.from_numpy(np.ascontiguousarray(x)).to(to_dtype.torch)
                    return half.view(torch.uint16).numpy().view(to)
                case "bitcast":
                    return x.view(to)
                case "trunc" | "zext" | "uitofp":
                    return _unsigned(x).astype(to)
                case "sext" | "sitofp":
                    return _signed(x).astype(to)
                case "fpext" | "fptrunc":
                    return x.astype(to)
                case "fptosi":
                    limit = 2.0 ** (to_dtype.bits - 1)
                    whole = np.trunc(x.astype(np.float64))
                    assert np.all((whole >= -limit) & (whole < limit)), "poison conversion"
                    return x.astype(to)
        raise AssertionError(opcode)

    def constant(self, dtype: DType, value: Any) -> Any:
        """A constant in every lane."""
        if dtype in FLOAT8:
            return np.full(self.count, short_float_bits(dtype, value), dtype=np.uint8)
        made = torch.full((self.count,), value, dtype=dtype.torch)
        return made.view(torch.uint16).numpy() if dtype.name == "bf16" else made.numpy()

    def libm(self, name: str, dtype: DType, *xs: Any) -> Any:
        """The C function in f64, rounded to the type."""
        special: dict[str, Callable[..., Any]] = {
            "fmod": np.fmod, "pow": np.power, "hypot": np.hypot, "nextafter": np.nextafter,
            "atan2": np.arctan2, "exp2": np.exp2,
        }  # fmt: skip
        with np.errstate(all="ignore"):
            if name in special:
                return special[name](*xs)
            wide = torch.from_numpy(np.ascontiguousarray(xs[0])).double()
            return getattr(torch, name)(wide).numpy().astype(_numpy(dtype))

    def has(self, feature: str) -> bool:
        """True for the features given."""
        return feature in self.features

    def rare(self, cond: Any, dtype: DType, fast: Any, slow: Callable[[], Any]) -> Any:
        """Both values, chosen per lane."""
        return self.select(cond, dtype, slow(), fast)


def as_lanes(x: torch.Tensor) -> Any:
    """A tensor as a value of the builder."""
    if x.dtype in [d.torch for d in FLOAT8]:
        return x.view(torch.uint8).numpy()
    return x.view(torch.uint16).numpy() if x.dtype is torch.bfloat16 else x.numpy()


def as_tensor(value: Any, dtype: DType) -> torch.Tensor:
    """A value of the builder as a tensor of the type."""
    value = np.ascontiguousarray(value)
    if dtype is BOOL:
        return torch.from_numpy(value)
    if dtype.name == "bf16":
        return torch.from_numpy(value.view(np.uint16)).view(torch.bfloat16)
    assert value.dtype.itemsize == dtype.bytes
    if dtype in FLOAT8:
        return torch.from_numpy(value.view(np.uint8)).view(dtype.torch)
    return torch.from_numpy(value.view(_numpy(dtype)))
