"""C math functions applied to vectors lane by lane, as helper functions of the module."""

from __future__ import annotations

from lenz.codegen.llvm.function import Module
from lenz.codegen.llvm.types import suffix, vector


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
