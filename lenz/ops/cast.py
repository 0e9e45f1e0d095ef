"""Conversions between element types.

Float to integer truncates. C leaves values outside the target's range undefined; we follow torch on
x86-64. The machine converts to i32 or i64, and an overflow gives the lowest integer: i8, i16, i32
and u16 are the low bits of the i32 result, i64, u32 and u8 those of the i64 result (torch itself
gives two answers for u32, one in its vector loop and one outside it), and u64 takes one subtraction
of 2^63 before the i64 conversion. A GPU saturates to i32, i64, u32 or u64 (NaN becomes 0, or the
top bit alone if one of the types has 64 bits); i8 and i16 are the low bits of the i32 result, u8
those of the i64 result, and u16 those of the u32 result.

8-bit floats come from f32 and go to it, as in torch, by rounding to nearest even. Overflow becomes
infinity in f8e5m2. f8e4m3fn has no infinity: torch since 2.12 gives the largest number (for
infinity too), and gave NaN before. Kernels hold them as bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from lenz.ir.dtype import (
    BOOL,
    F8E4M3FN,
    F8E5M2,
    F16,
    F32,
    F64,
    FLOAT8,
    I8,
    I16,
    I32,
    I64,
    NATIVE,
    U8,
    U16,
    U32,
    U64,
    DType,
    short_float_bits,
)
from lenz.ir.expr import Expr, const
from lenz.ir.op import Attrs, Op, OpForm, Types, on
from lenz.ops.arith import abs, minimum
from lenz.ops.compare import eq, where
from lenz.ops.emission import Builder, Values, triton_type
from lenz.ops.fold import apply, holds_exactly
from lenz.ops.rules import bitcast_rule, cast_rule, narrow_rule


def _float_to_signed(b: Builder, to: DType, frm: DType, x: Any) -> Any:
    """fptosi, with the lowest integer for NaN and out-of-range values."""
    limit = 2.0 ** (to.bits - 1)
    low = "fcmp ogt" if frm is F64 and to is I32 else "fcmp oge"
    # In f64, values above -2^31 - 1 truncate to -2^31 or more; f32 has no values in between.
    least = -limit - 1.0 if frm is F64 and to is I32 else -limit
    above = b.compare(low, frm, x, least)
    below = b.compare("fcmp olt", frm, x, limit)
    ok = b.binary("and", BOOL, above, below)
    safe = b.select(ok, frm, x, b.constant(frm, 0.0))
    found = b.convert("fptosi", to, frm, safe)
    return b.select(ok, to, found, b.constant(to, -(1 << (to.bits - 1))))


def _float_to_u64(b: Builder, frm: DType, x: Any) -> Any:
    half = 2.0**63
    great = b.compare("fcmp oge", frm, x, half)
    lowered = b.select(great, frm, b.binary("fsub", frm, x, half), x)
    found = _float_to_signed(b, I64, frm, lowered)
    return b.select(great, U64, b.binary("xor", I64, found, -(1 << 63)), found)


def _float_to_int(b: Builder, to: DType, frm: DType, x: Any) -> Any:
    if to is U64:
        return _float_to_u64(b, frm, x)
    # Beyond 2^31 the low byte of every f32 is 0, and of its i32 result.
    middle = I64 if to in (I64, U32) or (to is U8 and frm is F64) else I32
    found = _float_to_signed(b, middle, frm, x)
    return found if middle.bits == to.bits else b.convert("trunc", to, middle, found)


def _int_to_int(b: Builder, to: DType, frm: DType, x: Any) -> Any:
    if to.bits == frm.bits:
        return x  # LLVM integers carry no sign
    if to.bits < frm.bits:
        return b.convert("trunc", to, frm, x)
    return b.convert("sext" if frm.kind == "int" else "zext", to, frm, x)


def convert(b: Builder, to: DType, frm: DType, x: Any) -> Any:
    """Emit the conversion of a value between any two native types."""
    if to is frm:
        return x
    if to.is_half:
        # torch converts through f32 from every type, also from f64 and integers.
        return b.convert("f32_to_half", to, F32, convert(b, F32, frm, x))
    if frm.is_half:
        return convert(b, to, F32, b.convert("half_to_f32", F32, frm, x))
    if to is BOOL:
        pred = "fcmp une" if frm.is_float else "icmp ne"
        return b.compare(pred, frm, x, b.constant(frm, 0))
    if frm is BOOL:
        return b.convert("uitofp" if to.is_float else "zext", to, frm, x)
    if to.is_integer:
        return (_float_to_int if frm.is_float else _int_to_int)(b, to, frm, x)
    if frm.is_float:
        return b.convert("fpext" if to.bits > frm.bits else "fptrunc", to, frm, x)
    return b.convert("sitofp" if frm.kind == "int" else "uitofp", to, frm, x)


def _emit_cast(b: Builder, dtype: DType, args: Types, xs: Values, _: Attrs) -> Any:
    return convert(b, dtype, args[0], xs[0])


def _emit_bitcast(b: Builder, dtype: DType, args: Types, xs: Values, _: Attrs) -> Any:
    if dtype.is_integer and args[0].is_integer:
        return xs[0]
    return b.convert("bitcast", dtype, args[0], xs[0])


def _eager_cast(x: torch.Tensor, to: DType) -> torch.Tensor:
    if to.name == "u32" and x.dtype.is_floating_point:
        return x.to(torch.int64).to(to.torch)  # not torch's vector loop: see the module docstring
    return x.to(to.torch)


# The bytes of each type's largest result for numbers.
_TOP = {F8E4M3FN: short_float_bits(F8E4M3FN, 1e9), F8E5M2: 0x7C}


def _float8(x: Expr, to: DType) -> Expr:
    """The nearest 8-bit float of an f32, ties to even, in integer ops: sign, and one of two sums.

    With m mantissa bits (3 and 2), f32 has 23 - m bits to round away and a bias that is 120 and 112
    larger. Below the smallest normal, f32 addition rounds to a multiple of the smallest denormal
    (2^-9 and 2^-16): the unit in the last place of 2^14 and 2^7, whose own low byte is 0.
    """
    m, bias, magic = (3, 120, 2.0**14) if to is F8E4M3FN else (2, 112, 2.0**7)
    cut = 23 - m
    bits = bitcast(x, U32)
    size = bits & 0x7FFFFFFF
    odd = (size >> cut) & 1
    bound = const((1 << (cut - 1)) - 1 - (bias << 23), U32)
    normal = minimum((size + bound + odd) >> cut, _TOP[to])
    small = bitcast(abs(x) + magic, U32)
    found = where(size < ((bias + 1) << 23), small, normal)
    if _TOP[to] != 0x7F:
        found = where(size > 0x7F800000, 0x7F, found)
    sign = (bits >> 24) & 0x80
    return bitcast(cast(found | sign, U8), to)


def _float8_value(x: Expr) -> Expr:
    """An 8-bit float as f32 (exact), by way of f16, whose exponent has 5 bits."""
    if x.dtype is F8E5M2:  # the upper byte of an f16
        return cast(bitcast(cast(bitcast(x, U8), U16) << 8, F16), F32)
    # Sign, sign, exponent and mantissa, minus the second sign; f16's bias is larger by 8.
    wide = cast(bitcast(x, I8), I16) << 7
    half = bitcast(wide & 0xBFFF, F16)
    value = cast(half, F32) * 256.0
    return where(eq(abs(value), 480.0), float("nan"), value)


def _expand_cast(x: Expr, to: DType) -> Expr:
    """Conversions from and to 8-bit floats, expressed by others."""
    if x.dtype in FLOAT8:
        return cast(_float8_value(x), to)
    return _float8(cast(x, F32), to)


# The instruction converts two numbers. ptxas before 13 loses the result if it is one half of a word
# whose other half is computed from it, as in Triton's own conversion followed by a sum of bytes
# (docs/upstream). So a result is only widened, and a product and a sum, which ptxas does not take
# for halves of a word, join two of them.
_PTX = (
    "{{ .reg .b16 g, h; .reg .b32 v, w; cvt.rn.satfinite.{0}x2.f32 g, $2, $1; cvt.u32.u16 v, g;"
    " cvt.rn.satfinite.{0}x2.f32 h, $4, $3; cvt.u32.u16 w, h; mad.lo.u32 $0, w, 65536, v; }}"
)


def _float8_text(to: DType, frm: DType, given: str) -> str:
    """A number by the conversion of f32 of GPUs since 8.9, which saturates to the largest number.

    The largest are 448 and 57344; the ties with the next step are 464, rounded down, and 61440,
    rounded up. Infinity's byte follows the largest number's. A tile of one or two lanes has no four
    numbers for a word: there the word has one number four times.
    """
    x = cast_text(F32, frm, given)
    if _TOP[to] == 0x7F:
        x = f'tl.where(tl.abs({x}) > 464.0, float("nan"), {x})'
    start = f'tl.inline_asm_elementwise("{_PTX.format(to.name[2:6])}", "=r,f,f,f,f", '
    one = f"tl.cast({start}[{x}, {x}, {x}, {x}], tl.uint32, True, 1), tl.uint8)"
    found = f"({start}[{x}], tl.uint8, True, 4) if {given}.numel % 4 == 0 else {one})"
    return found if to is F8E4M3FN else f"{found} + tl.cast(tl.abs({x}) >= 61440.0, tl.uint8)"


# LLVM may assume that no float is out of an integer's range or NaN, and drops conversions on that
# ground. The instruction has the GPU's result, and is opaque to LLVM.
_REGISTER = {F32: "f", F64: "d", I32: "r", U32: "r", I64: "l", U64: "l"}


def _truncated_text(to: DType, frm: DType, x: str) -> str:
    """An f32 or f64 as an integer of 32 or 64 bits, rounded towards zero."""
    kind = "s" if to.kind == "int" else "u"
    ptx = f"cvt.rzi.{kind}{to.bits}.f{frm.bits} $0, $1;"
    registers = f"={_REGISTER[to]},{_REGISTER[frm]}"
    return f'tl.inline_asm_elementwise("{ptx}", "{registers}", [{x}], {triton_type(to)}, True, 1)'


def cast_text(to: DType, frm: DType, x: str) -> str:
    """Triton text that converts a value between any two types that loops move."""
    if to is frm:
        return x
    if frm is F8E5M2:  # the upper byte of an f16
        held = f"tl.cast(tl.cast({x}, tl.uint16) << 8, tl.float16, bitcast=True)"
        return cast_text(to, F16, held)
    if frm is F8E4M3FN:
        held = f"tl.cast({x}, tl.float8e4nv, bitcast=True)"
        return cast_text(to, F32, f"tl.cast({held}, tl.float32)")
    if to in FLOAT8:
        return _float8_text(to, frm, x)
    if to is BOOL:
        return f"{x} != 0"
    middle = F32 if to.is_half or frm.is_half else {U8: I64, U16: U32}.get(to, I32)
    if middle not in (to, frm) and (middle is F32 or (frm.is_float and to.bits < 32)):
        return cast_text(to, middle, cast_text(middle, frm, x))
    if frm.is_float and to.is_integer:
        return _truncated_text(to, frm, x)
    found = f"tl.cast({x}, {triton_type(to)})"
    # Triton would round only once if a narrower float follows. The sum prevents that, and is free:
    # LLVM knows that no integer becomes -0.0.
    rounds = to.is_float and frm.is_integer and not holds_exactly(to, frm)
    return f"{found} + 0.0" if rounds else found


def _cast_text(dtype: DType, args: Types, xs: tuple[str, ...], _: Attrs) -> str:
    return cast_text(dtype, args[0], xs[0])


def _bitcast_text(dtype: DType, _: Types, xs: tuple[str, ...], __: Attrs) -> str:
    return f"tl.cast({xs[0]}, {triton_type(dtype)}, bitcast=True)"


# CAST is a conversion in the program. NARROW is the rounding to f16 or bf16 at the end of an op on
# half types. It has the numerics of CAST, but opt/ may drop it if the rounded value is widened
# again at once.
CAST = Op(
    "cast",
    1,
    cast_rule,
    _eager_cast,
    expand=_expand_cast,
    forms=on(cpu=OpForm(_emit_cast, types=NATIVE), cuda=OpForm(_cast_text, types=NATIVE)),
)
NARROW = Op("narrow", 1, narrow_rule, _eager_cast, forms=on(cpu=_emit_cast, cuda=_cast_text))
BITCAST = Op(
    "bitcast",
    1,
    bitcast_rule,
    lambda x, to: x.view(to.torch),
    forms=on(cpu=_emit_bitcast, cuda=_bitcast_text),
    cost=0.0,
)


def cast(x: Expr, dtype: DType) -> Expr:
    """x converted to another type, by the rules at the top of this file; bool is x != 0."""
    return x if x.dtype is dtype else apply(CAST, x, attrs=(dtype,))


def narrow(x: Expr, dtype: DType) -> Expr:
    """The implicit rounding of an f32 to a half type; x itself if it has the type already."""
    return x if x.dtype is dtype else apply(NARROW, x, attrs=(dtype,))


def bitcast(x: Expr, dtype: DType) -> Expr:
    """The bits of x read as another type of the same width."""
    return x if x.dtype is dtype else apply(BITCAST, x, attrs=(dtype,))
