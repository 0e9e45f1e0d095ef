"""Conversions between element types.

Float to integer truncates. Outside the range of the target C leaves the value open; we give what
torch gives on x86-64, where the machine converts to i32 or i64 and an overflow there is the least
integer: i8, i16, i32, u8 and u16 are the low bits of the i32 result, i64 and u32 those of the i64
result (torch itself gives two answers for u32, one in its vector loop and one outside it), and
u64 is what one subtraction of 2^63 makes of the i64 result. A GPU gives the nearest value that i32,
i64, u32 or u64 has, and 0 for NaN; i8, i16, u8 and u16 are the low bits of the i32 result.
"""

from __future__ import annotations

from typing import Any

import torch

from lenz.ir.dtype import BOOL, F32, F64, I32, I64, U64, DType
from lenz.ir.expr import Expr
from lenz.ir.op import Op, define
from lenz.ops.emission import Builder, triton_type
from lenz.ops.fold import apply, holds_exactly
from lenz.ops.rules import bitcast_rule, cast_rule, narrow_rule


def _float_to_signed(b: Builder, to: DType, frm: DType, x: Any) -> Any:
    """fptosi with the least integer for NaN and for all that is out of range."""
    limit = 2.0 ** (to.bits - 1)
    low = "fcmp ogt" if frm is F64 and to is I32 else "fcmp oge"
    # In f64 the values above -2^31 - 1 truncate to -2^31 or more; in f32 there are none between.
    least = -limit - 1.0 if frm is F64 and to is I32 else -limit
    above = b.compare(low, frm, x, b.constant(frm, least))
    below = b.compare("fcmp olt", frm, x, b.constant(frm, limit))
    ok = b.binary("and", BOOL, above, below)
    safe = b.select(ok, frm, x, b.constant(frm, 0.0))
    found = b.convert("fptosi", to, frm, safe)
    return b.select(ok, to, found, b.constant(to, -(1 << (to.bits - 1))))


def _float_to_u64(b: Builder, frm: DType, x: Any) -> Any:
    half = b.constant(frm, 2.0**63)
    great = b.compare("fcmp oge", frm, x, half)
    lowered = b.select(great, frm, b.binary("fsub", frm, x, half), x)
    found = _float_to_signed(b, I64, frm, lowered)
    top = b.constant(I64, -(1 << 63))
    return b.select(great, U64, b.binary("xor", I64, found, top), found)


def _float_to_int(b: Builder, to: DType, frm: DType, x: Any) -> Any:
    if to is U64:
        return _float_to_u64(b, frm, x)
    middle = I32 if to.bits < 32 or to is I32 else I64
    found = _float_to_signed(b, middle, frm, x)
    return found if middle.bits == to.bits else b.convert("trunc", to, middle, found)


def _int_to_int(b: Builder, to: DType, frm: DType, x: Any) -> Any:
    if to.bits == frm.bits:
        return x  # LLVM integers carry no sign
    if to.bits < frm.bits:
        return b.convert("trunc", to, frm, x)
    return b.convert("sext" if frm.kind == "int" else "zext", to, frm, x)


def _float_to_float(b: Builder, to: DType, frm: DType, x: Any) -> Any:
    return b.convert("fpext" if to.bits > frm.bits else "fptrunc", to, frm, x)


def convert(b: Builder, to: DType, frm: DType, x: Any) -> Any:
    """Emit the conversion of a value between any two native types."""
    if to is frm:
        return x
    if to.is_half:
        # torch goes through f32 from every type, f64 and the integers too.
        return b.convert("f32_to_half", to, F32, convert(b, F32, frm, x))
    if frm.is_half:
        return convert(b, to, F32, b.convert("half_to_f32", F32, frm, x))
    if to is BOOL:
        pred = "fcmp une" if frm.is_float else "icmp ne"
        return b.compare(pred, frm, x, b.constant(frm, 0))
    if frm is BOOL:
        return b.convert("uitofp" if to.is_float else "zext", to, frm, x)
    match frm.is_float, to.is_float:
        case True, True:
            return _float_to_float(b, to, frm, x)
        case True, False:
            return _float_to_int(b, to, frm, x)
        case False, True:
            return b.convert("sitofp" if frm.kind == "int" else "uitofp", to, frm, x)
        case _:
            return _int_to_int(b, to, frm, x)


def _emit_cast(
    b: Builder, dtype: DType, args: tuple[DType, ...], xs: tuple[Any, ...], _: tuple[Any, ...]
) -> Any:
    return convert(b, dtype, args[0], xs[0])


def _emit_bitcast(
    b: Builder, dtype: DType, args: tuple[DType, ...], xs: tuple[Any, ...], _: tuple[Any, ...]
) -> Any:
    if dtype.is_integer and args[0].is_integer:
        return xs[0]
    return b.convert("bitcast", dtype, args[0], xs[0])


def _eager_cast(x: torch.Tensor, to: DType) -> torch.Tensor:
    if to.name == "u32" and x.dtype.is_floating_point:
        return x.to(torch.int64).to(to.torch)  # not torch's vector loop: see the module docstring
    return x.to(to.torch)


def _eager_bitcast(x: torch.Tensor, to: DType) -> torch.Tensor:
    return x.view(to.torch)


def cast_text(to: DType, frm: DType, x: str) -> str:
    """Triton text of the conversion of a value between any two native types."""
    if to is frm:
        return x
    if to is BOOL:
        return f"{x} != 0"
    middle = F32 if to.is_half or frm.is_half else I32  # as torch; and i8 from float wraps
    if middle not in (to, frm) and (middle is F32 or (frm.is_float and to.bits < 32)):
        return cast_text(to, middle, cast_text(middle, frm, x))
    found = f"tl.cast({x}, {triton_type(to)})"
    # Triton would round once where a narrower float follows; the sum stands between, and costs
    # nothing, as LLVM knows that no integer becomes -0.0.
    rounds = to.is_float and frm.is_integer and not holds_exactly(to, frm)
    return f"{found} + 0.0" if rounds else found


def _cast_text(
    dtype: DType, args: tuple[DType, ...], xs: tuple[str, ...], _: tuple[Any, ...]
) -> str:
    return cast_text(dtype, args[0], xs[0])


def _bitcast_text(
    dtype: DType, _: tuple[DType, ...], xs: tuple[str, ...], __: tuple[Any, ...]
) -> str:
    return f"tl.cast({xs[0]}, {triton_type(dtype)}, bitcast=True)"


# CAST is a conversion that the program asks for. NARROW is the rounding to f16 or bf16 at the end
# of an operation that torch defines on half types; its numerics are those of CAST, but opt/ may
# leave it out where the rounded value is at once widened again.
CAST = define(Op("cast", 1, cast_rule, _eager_cast, llvm=_emit_cast, triton=_cast_text))
NARROW = define(Op("narrow", 1, narrow_rule, _eager_cast, llvm=_emit_cast, triton=_cast_text))
BITCAST = define(
    Op(
        "bitcast",
        1,
        bitcast_rule,
        _eager_bitcast,
        llvm=_emit_bitcast,
        triton=_bitcast_text,
        cost=0.0,
    )
)


def cast(x: Expr, dtype: DType) -> Expr:
    """x as a value of another type, by the rules at the head of this file; bool is x != 0."""
    return x if x.dtype is dtype else apply(CAST, x, attrs=(dtype,))


def narrow(x: Expr, dtype: DType) -> Expr:
    """The implicit rounding of an f32 to a half type; x itself when it has the type already."""
    return x if x.dtype is dtype else apply(NARROW, x, attrs=(dtype,))


def bitcast(x: Expr, dtype: DType) -> Expr:
    """The bits of x read as another type of the same width."""
    return x if x.dtype is dtype else apply(BITCAST, x, attrs=(dtype,))
