"""Integer division without traps.

x86 faults on division by zero and on MIN / -1, and masked-off lanes may hold anything. So a divisor
that would fault is replaced: a quotient by zero is then some value, and MIN / -1 wraps.
"""

from __future__ import annotations

from lenz.ir.dtype import BOOL, DType
from lenz.machine.cpu.llvm.instructions import Instructions, Names
from lenz.machine.cpu.llvm.types import vector


def divide(b: Instructions, opcode: str, dtype: DType, x: Names, y: Names) -> Names:
    """sdiv, udiv, srem or urem; vectors of up to 32 bits go through f64, which is exact there."""
    signed = opcode[0] == "s"
    constant = not any(n.startswith("%") for n in y)
    if constant and all(_nonzero(n) for n in y) and not (signed and any("-1" in n for n in y)):
        return b.each(f"{opcode} {b.type(dtype)}", x, y)
    one, zero = b.constant(dtype, 1), b.constant(dtype, 0)
    bad = b.compare("icmp eq", dtype, y, zero)
    negate = b.compare("icmp eq", dtype, y, -1) if signed else bad
    if signed:
        bad = b.binary("or", BOOL, bad, negate)
    safe = b.select(bad, dtype, one, y)
    if b.lanes > 1 and dtype.bits <= 32:
        result = _by_double(b, opcode, dtype, x, safe)
    else:
        result = b.each(f"{opcode} {b.type(dtype)}", x, safe)
    if opcode == "sdiv":
        result = b.select(negate, dtype, b.binary("sub", dtype, zero, x), result)
    return result


def _nonzero(text: str) -> bool:
    return text.rstrip(")").split()[-1] not in ("0", "zeroinitializer")


def _by_double(b: Instructions, opcode: str, dtype: DType, x: Names, y: Names) -> Names:
    # |a| < 2^32 and b are exact in f64. The rounding error of a/b is at most a/b * 2^-53, less than
    # 1/b, the distance of a non-integer quotient from the next integer.
    signed = opcode[0] == "s"
    t, d = b.type(dtype), vector("double", b.lanes)
    wide = vector("i32" if signed else "i64", b.lanes)
    a = b.cast("sitofp" if signed else "uitofp", t, d, x)
    c = b.cast("sitofp" if signed else "uitofp", t, d, y)
    # The greatest quotient of u32 needs 33 bits as a signed integer, hence i64 there.
    whole = b.cast("fptosi", d, wide, b.each(f"fdiv {d}", a, c))
    if wide != t:
        whole = b.cast("trunc", wide, t, whole)
    if opcode[1:] == "div":
        return whole
    return b.binary("sub", dtype, x, b.binary("mul", dtype, whole, y))
