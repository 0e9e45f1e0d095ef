"""Single instructions, once per copy of the loop body.

A value is a tuple of SSA names or constants, one per copy of the loop body. Every method appends
one instruction per copy, so the copies of an unrolled body are interleaved and the processor
overlaps their latencies (10 to 20% on polynomials; copies one after another gain nothing).
"""

from __future__ import annotations

from lenz.ir.dtype import BOOL, DType
from lenz.machine.cpu.llvm.function import Function
from lenz.machine.cpu.llvm.types import constant, splat, value_type

Names = tuple[str, ...]


class Instructions:
    """Appends instructions on `lanes`-wide values in `copies` copies to the scope at `level`."""

    __slots__ = ("copies", "fn", "lanes", "level")

    def __init__(self, fn: Function, level: int, lanes: int, copies: int) -> None:
        self.fn = fn
        self.level = level
        self.lanes = lanes
        self.copies = copies

    def type(self, dtype: DType) -> str:
        """The LLVM type of a value."""
        return value_type(dtype, self.lanes)

    def each(self, head: str, *operands: Names) -> Names:
        """`head a, b, ...` once per copy."""
        texts = (f"{head} {', '.join(xs)}" for xs in zip(*operands, strict=True))
        return self.fn.lets(self.level, texts)

    def binary(self, opcode: str, dtype: DType, x: Names, y: Names | float) -> Names:
        """One two-operand instruction; a number is a constant in every lane."""
        return self.each(f"{opcode} {self.type(dtype)}", x, self.operand(dtype, y))

    def compare(self, pred: str, operand_dtype: DType, x: Names, y: Names | float) -> Names:
        """One comparison, "fcmp olt" or "icmp slt"; the result is i1."""
        return self.each(f"{pred} {self.type(operand_dtype)}", x, self.operand(operand_dtype, y))

    def operand(self, dtype: DType, y: Names | float) -> Names:
        """A value as it is, a number as a constant."""
        return y if isinstance(y, tuple) else self.constant(dtype, y)

    def select(self, cond: Names, dtype: DType, x: Names, y: Names) -> Names:
        """`x` where cond holds, else `y`."""
        c, t = self.type(BOOL), self.type(dtype)
        rows = zip(cond, x, y, strict=True)
        return self.fn.lets(self.level, (f"select {c} {p}, {t} {a}, {t} {b}" for p, a, b in rows))

    def cast(self, opcode: str, a: str, b: str, x: Names) -> Names:
        """One conversion instruction between LLVM types."""
        return self.fn.lets(self.level, (f"{opcode} {a} {n} to {b}" for n in x))

    def constant(self, dtype: DType, value: bool | int | float) -> Names:
        """A constant in every lane."""
        return (splat(value_type(dtype), constant(dtype, value), self.lanes),) * self.copies

    def has(self, feature: str) -> bool:
        """True when the target CPU has the feature."""
        return self.fn.module.target.has(feature)

    def any(self, cond: Names) -> str:
        """An i1 that is true if cond holds in any lane of any copy."""
        let = self.fn.let
        one, t = cond[0], self.type(BOOL)
        for other in cond[1:]:
            one = let(self.level, f"or {t} {one}, {other}")
        if self.lanes == 1:
            return one
        callee = self.fn.module.declare(f"llvm.vector.reduce.or.v{self.lanes}i1", "i1", t)
        return let(self.level, f"call i1 {callee}({t} {one})")
