"""Ops for which some processors have an instruction that their definition in simpler ops misses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lenz.ir.dtype import I32, DType
from lenz.ir.op import Op
from lenz.target import Target

if TYPE_CHECKING:
    from lenz.codegen.llvm.builder import Builder, Names


def has_native(op: Op, target: Target) -> bool:
    """True when `emit_native` knows the op on this target.

    `llvm.ldexp` is one vscalefps with AVX512; without it, LLVM calls the C function per lane, which
    is 20 times slower than the expansion.
    """
    return op.name == "scale" and target.has("avx512f") and target.has("avx512dq")


def emit_native(
    b: Builder, dtype: DType, dtypes: tuple[DType, ...], xs: tuple[Names, ...]
) -> Names:
    """scale(x, k) = x * 2^k."""
    x, k = xs
    if dtypes[1] is not I32:
        k = b.convert("trunc", I32, dtypes[1], k)
    if b.lanes > 1:
        return b.intrinsic("llvm.ldexp", dtype, x, k)
    # The scalar form would call the C function as well; one lane of a short vector does not.
    return _one_lane(b, dtype, x, k)


def _one_lane(b: Builder, dtype: DType, x: Names, k: Names) -> Names:
    t, lanes = b.type(dtype), 4 if dtype.bytes == 4 else 2
    v, i = f"<{lanes} x {t}>", f"<{lanes} x i32>"
    kind = f"v{lanes}f{dtype.bits}.v{lanes}i32"
    callee = b.fn.module.declare(f"llvm.ldexp.{kind}", v, v, i)
    out = []
    for a, c in zip(x, k, strict=True):
        wide = b.fn.let(b.level, f"insertelement {v} zeroinitializer, {t} {a}, i32 0")
        power = b.fn.let(b.level, f"insertelement {i} zeroinitializer, i32 {c}, i32 0")
        whole = b.fn.let(b.level, f"call {v} {callee}({v} {wide}, {i} {power})")
        out.append(b.fn.let(b.level, f"extractelement {v} {whole}, i32 0"))
    return tuple(out)
