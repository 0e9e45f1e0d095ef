"""Text of expressions, printed and read.

The text of an expression is linear in its DAG: a node that is used more than once, or is deeper
than `MAX_DEPTH`, is printed once as a temporary `t0`, `t1`, ... before the value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lenz.ir import op as _op
from lenz.ir.dtype import BOOL, BY_NAME, DType
from lenz.ir.expr import Expr, const, expr, index, is_bound_var, load, nodes_of, ref, syms_of
from lenz.ir.lexer import Cursor, buffer_of, items_of, list_of, string_of, sym_of
from lenz.ir.text import (
    PLAIN,
    WORDS,
    Scope,
    atom_of,
    dtype_of,
    number_of,
    range_of,
    show_atom,
    show_buffer,
    show_range,
)
from lenz.sym import Int, Sym, Var
from lenz.sym import show as show_sym

# Deepest nesting of an expression before it is split into lines; also bounds the reader's
# recursion.
MAX_DEPTH = 24
LINE = 100  # a body that fits in this many characters stays on the line of its node
DEEPEST = 200  # nesting of brackets in one value; the printer stays far below
# Words with another meaning for the reader where a temporary or a value may be.
RESERVED = {*BY_NAME, *WORDS, "reduce", "scan", "over", "for", "store"}
NO_TYPES: Mapping[str, DType] = {}


def _const(e: Expr) -> str:
    value, dtype = e.attrs
    if isinstance(value, bool):
        text = "true" if value else "false"
        return text if dtype.kind == "bool" else f"{text}:{dtype.name}"
    return f"{value!r}:{dtype.name}"


def show_bound(index: tuple[Sym, ...], texts: list[str]) -> str:
    """The operands of a gather, `; @0: 0..9 = text`, with their bounds from the index."""
    found = {v.name: v for part in index for v in part.free_vars if is_bound_var(v)}
    parts = []
    for k, text in enumerate(texts):
        v = found.get(f"@{k}")
        parts.append(f"@{k} = {text}" if v is None else f"@{k}: {show_range(v)} = {text}")
    return "; " + ", ".join(parts) if parts else ""


def _node(e: Expr, args: list[str], types: Mapping[str, DType]) -> str:
    if e.op is _op.CONST:
        return _const(e)
    if e.op is _op.REF:
        name = e.attrs[0]
        if types.get(name) is e.dtype and PLAIN.match(name) and name not in RESERVED:
            return str(name)
        return f"ref({json.dumps(name)}, {e.dtype.name})"
    if e.op is _op.INDEX:
        return f"index({show_sym(e.attrs[0])}, {e.dtype.name}{show_bound(syms_of(e), args)})"
    if e.op is _op.LOAD:
        name, where, dtype = e.attrs
        inside = ", ".join(map(show_sym, where)) + "]" + show_bound(where, args)
        suffix = "" if types.get("%" + name) is dtype else f":{dtype.name}"
        return f"load({show_buffer(name)}, [{inside}){suffix}"
    attrs = [a.name if isinstance(a, DType) else show_atom(a) for a in e.attrs]
    if e.op.arity < 0:
        return f"{e.op.name}({', '.join(args)}{'; ' if attrs else ''}{', '.join(attrs)})"
    return f"{e.op.name}({', '.join(args + attrs)})"


def _is_short(e: Expr) -> bool:
    if e.op is _op.CONST or e.op is _op.REF:
        return True
    return e.op is _op.INDEX and isinstance(e.attrs[0], (Int, Var)) and not e.args


def lines_of(body: Expr, types: Mapping[str, DType]) -> list[str]:
    """The temporaries of an expression, one per line, then its value.

    `types` has the dtype of each buffer (under "%name") and value known to the reader at this
    point; others are printed with their dtype.
    """
    nodes = nodes_of(body)
    uses: dict[Expr, int] = {}
    taken = {e.attrs[0] for e in nodes if e.op is _op.REF}
    for e in nodes:
        for a in e.args:
            uses[a] = uses.get(a, 0) + 1
    lines: list[str] = []
    text: dict[Expr, str] = {}
    depth: dict[Expr, int] = {}
    count = 0
    for e in nodes:
        text[e] = _node(e, [text[a] for a in e.args], types)
        depth[e] = 1 + max((depth[a] for a in e.args), default=0)
        shared = uses.get(e, 0) > 1 and not _is_short(e)
        if e is not body and (shared or depth[e] > MAX_DEPTH):
            while f"t{count}" in taken:
                count += 1
            lines.append(f"t{count} = {text[e]}")
            text[e] = f"t{count}"
            depth[e] = 0
            count += 1
    return [*lines, text[body]]


def show_block(body: Expr, types: Mapping[str, DType], indent: str = "") -> str:
    """`{ value }` or `{ t0 = ...; value }`; on several lines if it is long.

    `indent` is the indentation of the block's first line.
    """
    lines = lines_of(body, types)
    if sum(map(len, lines)) + 2 * len(lines) <= LINE:
        return "{ " + "; ".join(lines) + " }"
    return "{\n" + "".join(f"{indent}  {line}\n" for line in lines) + indent + "}"


def show_expr(e: Expr, types: Mapping[str, DType] = NO_TYPES, indent: str = "") -> str:
    """An expression in the place of a value: plain, or a block if it has temporaries."""
    lines = lines_of(e, types)
    return lines[0] if len(lines) == 1 else show_block(e, types, indent)


def block_of(c: Cursor, s: Scope) -> Expr:
    """`{ t0 = value; value }`."""
    c.expect("{")
    temps: dict[str, Expr] = {}
    while c.kind == "word":
        place = c.place
        name = c.take()
        if not c.accept("="):
            c.jump(place)
            break
        temps[name] = value_of(c, s, temps)
        c.accept(";")
    value = value_of(c, s, temps)
    c.accept(";")
    c.expect("}")
    return value


def value_of(c: Cursor, s: Scope, temps: dict[str, Expr]) -> Expr:
    """An expression; `temps` are the temporaries of the block around it."""
    place = c.place
    s.depth += 1
    if s.depth > DEEPEST:
        raise c.error("nested too deeply: give parts of it a name")
    try:
        if c.text == "{":
            return block_of(c, s)
        if c.kind != "word" or c.text in WORDS:
            return _const_of(c)
        name = c.take()
        if c.text == "(":
            return _call_of(c, name, s, temps)
        if name in temps:
            return temps[name]
        if name in s.types:
            return ref(name, s.types[name])
        raise c.error(f"no value is called `{name}` here", place)
    except TypeError as e:  # what an op's type rule raises
        raise c.error(str(e), place) from e
    finally:
        s.depth -= 1


def _const_of(c: Cursor) -> Expr:
    place = c.place
    if c.text in ("true", "false"):
        return const(c.take() == "true", dtype_of(c) if c.accept(":") else BOOL)
    if c.kind not in ("int", "float") and c.text not in ("-", "inf", "nan"):
        c.fail("a value")
    value = number_of(c)
    c.expect(":")
    dtype = dtype_of(c)
    if isinstance(value, float) and not dtype.is_float:
        raise c.error(f"{value!r} is no {dtype.name}", place)
    return const(value, dtype)


def _call_of(c: Cursor, name: str, s: Scope, temps: dict[str, Expr]) -> Expr:
    place = c.place - 1
    c.expect("(")
    match name:
        case "load":
            return _load_of(c, s, temps)
        case "index":
            return _index_of(c, s, temps)
        case "ref":
            value = string_of(c)
            c.expect(",")
            dtype = dtype_of(c)
            c.expect(")")
            return ref(value, dtype)
    try:
        op = _op.op_named(name)
    except KeyError:
        raise c.error(f"no op is called `{name}`", place) from None
    args: list[Expr] = []
    while c.text not in (")", ";") and (op.arity < 0 or len(args) < op.arity):
        if args:
            c.expect(",")
        args.append(value_of(c, s, temps))
    if op.arity < 0:
        c.accept(";")
    elif args and c.text != ")":
        c.expect(",")

    def attr() -> Any:
        return BY_NAME[c.take()] if c.text in BY_NAME else atom_of(c, s)

    return expr(op, *args, attrs=tuple(list_of(c, attr, ")")))


def gathered(
    c: Cursor, s: Scope, temps: dict[str, Expr], place: int, is_list: bool = True
) -> tuple[tuple[Sym, ...], tuple[Expr, ...]]:
    """The index at `place`, earlier in the text, and its operands here, `; @0: 0..9 = value`.

    The index is read after them: then the bounds of the operands are known.
    """
    found: dict[str, Var] = {}

    def one() -> Expr:
        c.expect("@")
        if c.text != str(len(found)):
            c.fail(f"`{len(found)}`, the next operand")
        name = f"@{c.take()}"
        found[name] = range_of(c, name, s) if c.accept(":") else Var(name)
        c.expect("=")
        return value_of(c, s, temps)

    bound = items_of(c, one, ")") if c.accept(";") else []
    end = c.place
    c.jump(place)
    scope = {**s.vars, **found} if found else s.vars

    def size() -> Sym:
        return sym_of(c, scope)

    where = list_of(c, size, "]") if is_list else [size()]
    c.jump(end)
    return tuple(where), tuple(bound)


def _load_of(c: Cursor, s: Scope, temps: dict[str, Expr]) -> Expr:
    start = c.place
    buffer = buffer_of(c)
    c.expect(",", "[")
    place = c.place
    c.skip_to("]")
    c.expect("]")
    where, bound = gathered(c, s, temps, place)
    c.expect(")")
    if c.accept(":"):
        dtype = dtype_of(c)
    elif "%" + buffer in s.types:
        dtype = s.types["%" + buffer]
    else:
        raise c.error(f"%{buffer} is not defined before it is read", start)
    return load(buffer, where, dtype, bound)


def _index_of(c: Cursor, s: Scope, temps: dict[str, Expr]) -> Expr:
    place = c.place
    c.skip_to(",")
    c.expect(",")
    dtype = dtype_of(c)
    (value,), bound = gathered(c, s, temps, place, is_list=False)
    c.expect(")")
    return index(value, dtype, bound)
