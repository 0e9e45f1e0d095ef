"""The builder for the LLVM forms of the op table: instructions and sequences of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lenz.ir.dtype import BF16, DType
from lenz.machine.cpu.llvm import convert, library
from lenz.machine.cpu.llvm.function import COLD
from lenz.machine.cpu.llvm.instructions import Instructions, Names
from lenz.machine.cpu.llvm.types import suffix, value_type
from lenz.ops.emission import MUL_HIGH_NAME, MUL_LOW_NAME, SCALEF

# Intrinsics with a special form.
OWN: dict[str, Callable[..., Names]] = {
    "llvm.copysign": library.copysign,
    "llvm.ldexp": library.ldexp,
    SCALEF: library.scalef,
    MUL_HIGH_NAME: partial(library.product_part, 1),
    MUL_LOW_NAME: partial(library.product_part, 0),
}
# Where a failed check stores its code: a word of the call's own context, which several threads may
# set.
FAILED = "%failed"
# Copies whose values stay in registers while a test of all of them runs; those of a tile do not.
FEW = 8
_DIVISIONS = ("sdiv", "udiv", "srem", "urem")


class Builder(Instructions):
    """Instructions and sequences of them."""

    __slots__ = ()

    def binary(self, opcode: str, dtype: DType, x: Names, y: Names | float) -> Names:
        """One two-operand instruction. Integer division by zero gives some value without a trap."""
        if opcode in _DIVISIONS:
            return library.divide(self, opcode, dtype, x, self.operand(dtype, y))
        return super().binary(opcode, dtype, x, y)

    def intrinsic(self, name: str, dtype: DType, *xs: Names) -> Names:
        """A call of an intrinsic that is overloaded on its result type."""
        if name in OWN:
            return OWN[name](self, dtype, *xs)
        t, element = self.type(dtype), value_type(dtype)
        callee = self.fn.module.declare(f"{name}.{suffix(element, self.lanes)}", t, *[t] * len(xs))
        return library.call_lanes(self, callee, element, xs)

    def convert(self, opcode: str, to_dtype: DType, from_dtype: DType, x: Names) -> Names:
        """One conversion instruction, or half_to_f32 and f32_to_half for the 16-bit floats."""
        if opcode == "half_to_f32":
            return convert.half_to_f32(self, from_dtype, x)
        if opcode == "f32_to_half":
            exact = partial(convert.f32_to_half, self, to_dtype, x)
            if to_dtype is BF16 and self.lanes == 16 and len(x) <= FEW and self.has("avx512bf16"):
                return self.rare(*convert.to_bf16(self, x), exact)
            return exact()
        a, b = self.type(from_dtype), self.type(to_dtype)
        if a == b and opcode in ("bitcast", "zext", "sext", "trunc"):
            return x
        return self.cast(opcode, a, b, x)

    def libm(self, name: str, dtype: DType, *xs: Names) -> Names:
        """The C math function of this name for the type."""
        return library.math(self, name, dtype, *xs)

    def fail(self, cond: Names, code: int) -> None:
        """Record that cond held somewhere; the kernel returns the code of one that did."""
        fn, some, number = self.fn, self.any(cond), self.fn.label()
        fn.put(self.level, f"  br i1 {some}, label %bad.{number}, label %ok.{number}, {COLD}")
        fn.block(self.level, f"bad.{number}")
        fn.put(self.level, f"  store i64 {code}, ptr {FAILED}, align 8")
        fn.put(self.level, f"  br label %ok.{number}")
        fn.block(self.level, f"ok.{number}")

    def rare(self, cond: Names, dtype: DType, fast: Names, slow: Callable[[], Names]) -> Names:
        """`slow()` where cond holds, else `fast`; slow runs only if cond holds anywhere."""
        fn, t = self.fn, self.type(dtype)
        some, number = self.any(cond), fn.label()
        start = fn.scopes[self.level].label
        fn.put(self.level, f"  br i1 {some}, label %rare.{number}, label %on.{number}, {COLD}")
        fn.block(self.level, f"rare.{number}")
        mixed = self.select(cond, dtype, slow(), fast)
        end = fn.scopes[self.level].label
        fn.put(self.level, f"  br label %on.{number}")
        fn.block(self.level, f"on.{number}")
        rows = zip(fast, mixed, strict=True)
        return fn.lets(self.level, (f"phi {t} [ {f}, %{start} ], [ {m}, %{end} ]" for f, m in rows))
