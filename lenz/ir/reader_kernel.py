"""Reading kernels; see reader.py."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast, get_args

from lenz.ir.graph import REDUCE_KINDS, SCAN_KINDS, UPDATE_MODES
from lenz.ir.kernel import (
    LOOP_KINDS,
    For,
    Kernel,
    KernelKind,
    Let,
    Local,
    LookBack,
    Mode,
    Param,
    Reduce,
    Scan,
    Sort,
    Stmt,
    Store,
    TileConfig,
)
from lenz.ir.lexer import Cursor, buffer_of, choice_of, enclosed, int_of, list_of, name_of, sym_of
from lenz.ir.printer_expr import acc_dtype
from lenz.ir.reader_expr import (
    Scope,
    axis_of,
    block_of,
    bound_of,
    dtype_of_text,
    number_of,
    sizes_of,
    value_of,
)
from lenz.sym import Var


def kernel_of(c: Cursor) -> Kernel:
    """A kernel, from its name on."""
    c.expect("@")
    name = name_of(c)
    kind = choice_of(c, get_args(KernelKind), "a kind of kernel")
    c.expect("(")
    s = Scope()
    # Sizes of parameters use the sizes, which stand after them.
    start = c.place
    depth = 0
    while depth or not (c.text in (";", ")") and c.kind == "mark"):
        if c.kind == "end":
            c.fail("`)`")
        depth += (c.text in ("(", "[")) - (c.text in (")", "]"))
        c.take()
    sizes = sizes_of(c, s, ")") if c.accept(";") else ()
    end = c.place
    c.jump(start)
    params = tuple(list_of(c, lambda: _param(c, s), ")", (";",)))
    if c.accept(";"):
        c.jump(end)
    else:
        c.expect(")")
    tile = _tile(c) if c.accept("tile") else TileConfig()
    c.expect("{")
    local: list[Local] = []
    while c.accept("local"):
        local.append(_local(c, s))
    body = _body(c, s)
    return Kernel(name, cast(KernelKind, kind), params, sizes, body, tuple(local), tile)


def _param(c: Cursor, s: Scope) -> Param:
    name = buffer_of(c)
    c.expect(":")
    mode = choice_of(c, get_args(Mode), "a mode")
    dtype = dtype_of_text(c)
    size = enclosed(c, lambda: sym_of(c, s.vars))
    s.types["%" + name] = dtype
    return Param(name, dtype, size, cast(Mode, mode), c.accept("aligned"))


def _local(c: Cursor, s: Scope) -> Local:
    name = buffer_of(c)
    c.expect(":")
    dtype = dtype_of_text(c)
    size = enclosed(c, lambda: int_of(c))
    s.types["%" + name] = dtype
    return Local(name, dtype, size)


def _tile(c: Cursor) -> TileConfig:
    names = tuple(f.name for f in fields(TileConfig))

    def one() -> tuple[str, Any]:
        name = choice_of(c, names, "a number of the tile")
        c.expect(":")
        return name, number_of(c)

    c.expect("(")
    return TileConfig(**dict(list_of(c, one, ")")))


def _body(c: Cursor, s: Scope) -> tuple[Stmt, ...]:
    """Statements up to the closing brace, which is passed."""
    found: list[Stmt] = []
    while not c.accept("}"):
        found.append(_stmt(c, s))
        c.accept(";")
    return tuple(found)


def _stmt(c: Cursor, s: Scope) -> Stmt:
    place = c.place
    if c.follows("for") and c.kind == "word":
        c.take()
        axis = axis_of(c, s, "in")
        c.expect(":")
        kind = choice_of(c, LOOP_KINDS, "a kind of loop")
        c.expect("{")
        inner = s.inner((axis,))
        return For(axis, kind, _body(c, inner))  # type: ignore[arg-type]  # taken from the list
    if c.kind == "word" and c.accept("store"):
        mode = "set" if c.text == "(" else choice_of(c, UPDATE_MODES, "a mode of update")
        return _store(c, s, mode)
    if c.kind == "word" and c.accept("sort"):
        return _sort(c, s)
    name = name_of(c)
    c.expect("=")
    if c.accept("reduce"):
        kind = choice_of(c, REDUCE_KINDS, "a kind of reduction")
        value = block_of(c, s) if c.text == "{" else enclosed(c, lambda: value_of(c, s, {}), "()")
        c.expect("over")
        over: list[Var] = []
        if not c.accept("none"):
            over.append(_loop_var(c, s))
            while c.accept(","):
                over.append(_loop_var(c, s))
        s.types[name] = acc_dtype(kind, value.dtype)  # type: ignore[arg-type]  # from the list
        return Reduce(name, kind, value, tuple(over))  # type: ignore[arg-type]  # as above
    if c.accept("scan"):
        kind = choice_of(c, SCAN_KINDS, "a kind of scan")
        value = block_of(c, s)
        c.expect("over")
        s.types[name] = value.dtype
        loop = _loop_var(c, s)
        every = int_of(c) if c.accept("every") else 0
        back = _look_back(c, s) if c.accept("behind") else None
        return Scan(name, kind, value, loop, back, every)  # type: ignore[arg-type]  # as above
    if c.place == place:
        c.fail("a statement")
    value = value_of(c, s, {})
    s.types[name] = value.dtype
    return Let(name, value)


def _sort(c: Cursor, s: Scope) -> Sort:
    c.expect("(")
    buffer = buffer_of(c)
    c.expect(",")
    size = keep = sym_of(c, s.vars)
    if c.accept(","):
        c.expect("keep")
        keep = sym_of(c, s.vars)
    c.expect(")")
    return Sort(buffer, size, keep)


def _look_back(c: Cursor, s: Scope) -> LookBack:
    block = _loop_var(c, s)
    c.expect("by")
    work = buffer_of(c)
    at = enclosed(c, lambda: sym_of(c, s.vars))
    c.expect("group")
    return LookBack(block, work, at, int_of(c))


def _loop_var(c: Cursor, s: Scope) -> Var:
    if c.text not in s.vars:
        raise c.error(f"`{c.text}` is no loop around this")
    return s.vars[c.take()]


def _store(c: Cursor, s: Scope, mode: str) -> Store:
    c.expect("(")
    buffer = buffer_of(c)
    c.expect(",", "[")
    inside = c.place
    c.skip_to("]")
    c.take()
    c.expect(",")
    value = value_of(c, s, {})
    found, bound = bound_of(c, s, {})
    end = c.place
    c.jump(inside)
    offset = sym_of(c, {**s.vars, **found} if found else s.vars, bool(found))
    c.jump(end)
    return Store(buffer, offset, value, bound, mode)  # type: ignore[arg-type]  # from the list
