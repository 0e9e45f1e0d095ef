"""Text of kernels; see printer.py."""

from __future__ import annotations

from dataclasses import fields

from lenz.ir.dtype import DType
from lenz.ir.kernel import For, Kernel, Let, Reduce, Scan, Sort, Stmt, Store, TileConfig
from lenz.ir.lines import Lines
from lenz.ir.printer_expr import (
    LINE,
    acc_dtype,
    show_axis_name,
    show_block,
    show_bound,
    show_name,
    show_range,
    show_value,
)
from lenz.sym import show as show_sym


def show_tile(t: TileConfig) -> str:
    """` tile(grain: 4)`: the numbers that differ from the default; "" when none does."""
    usual = TileConfig()
    parts = [
        f"{f.name}: {getattr(t, f.name)!r}"
        for f in fields(TileConfig)
        if getattr(t, f.name) != getattr(usual, f.name)
    ]
    return f" tile({', '.join(parts)})" if parts else ""


def kernel_lines(k: Kernel, out: Lines) -> Lines:
    """Add the text of a kernel to `out`."""
    params = [
        f"%{show_name(p.name)}: {p.mode} {p.dtype.name}[{show_sym(p.size)}]"
        + " aligned" * p.aligned
        for p in k.params
    ]
    sizes = ", ".join(f"{v.name}: {show_range(v)}" for v in k.sizes)
    header = ", ".join(params) + (f"; {sizes}" if sizes else "")
    types: dict[str, DType] = {"%" + p.name: p.dtype for p in k.params}
    head = f"kernel @{show_name(k.name)} {k.kind} ({header}){show_tile(k.tile)}"
    with out.block(head, k):
        for local in k.locals:
            line = f"local %{show_name(local.name)}: {local.dtype.name}[{local.size}]"
            out.add(line, local)
            types["%" + local.name] = local.dtype
        _body(k.body, out, types)
    return out


def _body(body: tuple[Stmt, ...], out: Lines, types: dict[str, DType]) -> None:
    for s in body:
        if not isinstance(s, For):
            out.add(show_stmt(s, types, out.indent), s)
            continue
        head = f"for {show_axis_name(s.axis)} in {show_sym(s.axis.extent)} : {s.kind}"
        if len(s.body) == 1 and not isinstance(s.body[0], For):
            inner = show_stmt(s.body[0], types, out.indent + "  ")
            line = f"{head} {{ {inner} }}"
            if len(line) <= LINE and "\n" not in inner:
                out.add(line, s)
                out.mark_last(s.body[0])
                continue
            with out.block(head, s):
                out.add(inner, s.body[0])
            continue
        with out.block(head, s):
            _body(s.body, out, types)


def show_stmt(
    s: Let | Reduce | Scan | Sort | Store, types: dict[str, DType], indent: str = ""
) -> str:
    """One statement that is not a loop; enters the name it defines into `types`."""
    match s:
        case Let(name, value):
            line = f"{show_name(name)} = {show_value(value, types, indent)}"
            types[name] = value.dtype
        case Reduce(name, kind, value, over):
            loops = ", ".join(v.name for v in over) or "none"
            body = show_block(value, types, indent)
            line = f"{show_name(name)} = reduce {kind} {body} over {loops}"
            types[name] = acc_dtype(kind, value.dtype)
        case Scan(name, kind, value, loop, back, every):
            body = show_block(value, types, indent)
            line = f"{show_name(name)} = scan {kind} {body} over {loop.name}"
            line += f" every {every}" if every else ""
            if back is not None:
                place = f"%{show_name(back.work)}[{show_sym(back.at)}]"
                line += f" behind {back.block.name} by {place} group {back.group}"
            types[name] = value.dtype
        case Sort(buffer, size, keep):
            few = "" if keep is size else f", keep {show_sym(keep)}"
            line = f"sort(%{show_name(buffer)}, {show_sym(size)}{few})"
        case Store(buffer, offset, value, bound, mode):
            operands = show_bound((offset,), [show_value(b, types, indent) for b in bound])
            value_text = show_value(value, types, indent)
            head = "store" if mode == "set" else f"store {mode}"
            line = f"{head}(%{show_name(buffer)}, [{show_sym(offset)}], {value_text}{operands})"
    return line
