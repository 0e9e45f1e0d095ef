"""C math functions applied to vectors lane by lane, and one that is better done by vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lenz.codegen.llvm.function import Module
from lenz.codegen.llvm.types import suffix, value_type, vector
from lenz.ir.dtype import DType

if TYPE_CHECKING:
    from lenz.codegen.llvm.builder import Builder, Names


def lanewise(module: Module, symbol: str, element: str, arity: int, lanes: int) -> str:
    """The name (with @) of a function on vectors that calls `symbol` on each lane."""
    callee = module.declare(symbol, element, *([element] * arity))
    if lanes == 1:
        return callee
    name = f"lanes.{symbol}.{suffix(element, lanes)}"
    if name not in module.functions:
        t = vector(element, lanes)
        lines = []
        before = "poison"
        for lane in range(lanes):
            for k in range(arity):
                lines.append(f"  %x{k}.{lane} = extractelement {t} %x{k}, i32 {lane}")
            args = ", ".join(f"{element} %x{k}.{lane}" for k in range(arity))
            lines.append(f"  %y.{lane} = call {element} {callee}({args})")
            lines.append(
                f"  %r.{lane} = insertelement {t} {before}, {element} %y.{lane}, i32 {lane}"
            )
            before = f"%r.{lane}"
        params = ", ".join(f"{t} %x{k}" for k in range(arity))
        body = "\n".join(lines)
        module.functions[name] = (
            f"define internal {t} @{name}({params}) noinline #0 {{\n{body}\n  ret {t} {before}\n}}"
        )
    return f"@{name}"


def ldexp(b: Builder, dtype: DType, x: Names, k: Names) -> Names:
    """x * 2^k for i32 exponents by vscalef of AVX512, which LLVM has for vectors only."""
    fn, level, element = b.fn, b.level, value_type(dtype)
    lanes = b.lanes if b.lanes > 1 else 16 // dtype.bytes
    v, i = vector(element, lanes), vector("i32", lanes)
    name = f"llvm.ldexp.{suffix(element, lanes)}.{suffix('i32', lanes)}"
    callee = fn.module.declare(name, v, v, i)
    out: list[str] = []
    for a, c in zip(x, k, strict=True):
        if b.lanes > 1:
            out.append(fn.let(level, f"call {v} {callee}({v} {a}, {i} {c})"))
            continue
        wide = fn.let(level, f"insertelement {v} zeroinitializer, {element} {a}, i32 0")
        power = fn.let(level, f"insertelement {i} zeroinitializer, i32 {c}, i32 0")
        whole = fn.let(level, f"call {v} {callee}({v} {wide}, {i} {power})")
        out.append(fn.let(level, f"extractelement {v} {whole}, i32 0"))
    return tuple(out)
