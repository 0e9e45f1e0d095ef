"""Reading the parts that all levels share: types, axes, arguments, expressions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from lenz.ir import op as _op
from lenz.ir.dtype import DTYPES, DType
from lenz.ir.expr import Expr, const, expr, index, load, ref
from lenz.ir.graph import Atom, Named, Ref
from lenz.ir.lexer import (
    Cursor,
    buffer_of,
    choice_of,
    enclosed,
    int_of,
    list_of,
    name_of,
    string_of,
    sym_of,
    tuple_of,
    word_of,
)
from lenz.ir.tensor import Axis, Layout, TensorType, axis, contiguous_strides
from lenz.sym import ZERO, Sym, Var

_DTYPES = {d.name: d for d in DTYPES}
_WORDS: dict[str, Atom] = {
    "true": True, "false": False, "none": None, "inf": float("inf"), "nan": float("nan"),
}  # fmt: skip
_NAMED = ("dtype", "device", "layout", "memory_format", "op", "obj")
DEEPEST = 200  # nesting of brackets in one value; the printer stays far below


@dataclass(slots=True)
class Scope:
    """What names mean at this point of the text."""

    vars: dict[str, Var] = field(default_factory=dict)  # sizes, axes
    types: dict[str, DType] = field(default_factory=dict)  # "%buffer" and value -> dtype
    device: str = ""
    depth: int = 0

    def inner(self, axes: tuple[Axis, ...]) -> Scope:
        """The same with axes."""
        new = {**self.vars, **{a.name: a.var for a in axes}}
        return Scope(new, self.types, self.device, self.depth)


def range_of(c: Cursor, name: str, s: Scope) -> Var:
    """Bounds, `0..9 < s0`, of a variable of this name."""
    lo = None if c.text == ".." else int_of(c)
    c.expect("..")
    hi = int_of(c) if c.kind == "int" or c.text == "-" else None
    below = sym_of(c, s.vars) if c.accept("<") else None
    return Var(name, lo, hi, below)


def sizes_of(c: Cursor, s: Scope, close: str) -> tuple[Var, ...]:
    """Declared sizes up to `close`, which are in scope from there on."""

    def one() -> Var:
        name = name_of(c)
        c.expect(":")
        v = s.vars[name] = range_of(c, name, s)
        return v

    return tuple(list_of(c, one, close))


def header_of(c: Cursor) -> tuple[str, tuple[Var, ...], Scope]:
    """`@name(s0: 1..) on cuda:0 {`: the name, the sizes, and the scope that they are in."""
    c.expect("@")
    name, s = name_of(c), Scope()
    c.expect("(")
    sizes = sizes_of(c, s, ")")
    if c.accept("on"):
        s.device = word_of(c)
    c.expect("{")
    return name, sizes, s


def axis_of(c: Cursor, s: Scope, between: str = ":") -> Axis:
    """`i: s0`, or `i as 0..9: s0` with explicit bounds."""
    name = name_of(c)
    given = range_of(c, name, s) if c.accept("as") else None
    c.expect(between)
    extent = sym_of(c, s.vars)
    return axis(name, extent) if given is None else Axis(given, extent)


def axes_of(c: Cursor, s: Scope, first: str = "(", until: tuple[str, ...] = ()) -> tuple[Axis, ...]:
    """Axes with commas between, from a first mark up to the bracket, or to one of `until`."""
    c.expect(first)
    return tuple(list_of(c, lambda: axis_of(c, s), ")", until))


def dtype_of_text(c: Cursor) -> DType:
    """An element type by name."""
    return _DTYPES[choice_of(c, _DTYPES, "an element type")]


def type_of(c: Cursor, s: Scope) -> TensorType:
    """`f32[s0, 4 : 8, 2 @ 1] on cuda:0`."""
    dtype = dtype_of_text(c)
    c.expect("[")

    def size() -> Sym:
        return sym_of(c, s.vars)

    shape = tuple(list_of(c, size, "]", (":", "@")))
    stride = contiguous_strides(shape)
    offset: Sym = ZERO
    place = c.place
    if c.accept(":"):
        stride = tuple(list_of(c, size, "]", ("@",)))
        if len(stride) != len(shape):
            raise c.error(f"{len(shape)} sizes but {len(stride)} strides", place)
    if c.accept("@"):
        offset = size()
    c.expect("]")
    device = word_of(c) if c.accept("on") else s.device
    return TensorType(dtype, device, Layout(shape, stride, offset))


def number_of(c: Cursor) -> int | float:
    """A number, exact: what `repr` gives; inf and nan by name."""
    sign = -1 if c.accept("-") else 1
    if c.kind == "int":
        return sign * int(c.take())
    if c.kind != "float" and c.text not in ("inf", "nan"):
        c.fail("a number")
    return sign * float(c.take())


def atom_of(c: Cursor, s: Scope) -> Atom:
    """One argument of a call, or one output."""
    if c.kind == "string":
        return string_of(c)
    if c.text == "%":
        return Ref(buffer_of(c))
    if c.accept("("):
        return tuple(list_of(c, lambda: atom_of(c, s), ")"))
    if c.accept("["):
        value = sym_of(c, s.vars)
        c.expect("]")
        return value
    if c.text in _WORDS:
        return _WORDS[c.take()]
    if c.follows("complex", "("):
        c.take()
        c.take()
        real, imag = list_of(c, lambda: number_of(c), ")")
        return complex(real, imag)
    if c.kind == "word":
        kind = choice_of(c, _NAMED, "an argument")
        return Named(cast(Any, kind), enclosed(c, lambda: word_of(c), "()"))
    return number_of(c)


def call_args(c: Cursor, s: Scope) -> tuple[tuple[Atom, ...], tuple[tuple[str, Atom], ...]]:
    """Arguments of a call in brackets: the plain ones and those by name."""
    args: list[Atom] = []
    kwargs: list[tuple[str, Atom]] = []

    def one() -> None:
        place = c.place
        if c.kind == "word":
            name = c.take()
            if c.accept("="):
                kwargs.append((name, atom_of(c, s)))
                return
            c.jump(place)
        args.append(atom_of(c, s))

    c.expect("(")
    list_of(c, one, ")")
    return tuple(args), tuple(kwargs)


def held_of(c: Cursor) -> tuple[bool, tuple[str, ...]]:
    """Whether a call holds its memory, and what the calls hold that it waits for."""
    holds = c.accept("holds")
    return holds, tuple_of(c, lambda: buffer_of(c)) if c.accept("waits") else ()


def attr_of(c: Cursor, s: Scope) -> Any:
    """An attribute of an op: a dtype, or as an argument."""
    return _DTYPES[c.take()] if c.text in _DTYPES else atom_of(c, s)


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
        if c.kind != "word" or c.text in _WORDS:
            return _const(c)
        name = c.take()
        if c.text == "(":
            return _call(c, name, s, temps)
        if name in temps:
            return temps[name]
        if name in s.types:
            return ref(name, s.types[name])
        raise c.error(f"no value is called `{name}` here", place)
    except TypeError as e:  # what an op's type rule raises
        raise c.error(str(e), place) from e
    finally:
        s.depth -= 1


def _const(c: Cursor) -> Expr:
    place = c.place
    if c.text in ("true", "false"):
        is_true = c.take() == "true"
        return const(is_true, dtype_of_text(c) if c.accept(":") else _DTYPES["bool"])
    if c.kind not in ("int", "float") and c.text not in ("-", "inf", "nan"):
        c.fail("a value")
    value = number_of(c)
    c.expect(":")
    dtype = dtype_of_text(c)
    if isinstance(value, float) and not dtype.is_float:
        raise c.error(f"{value!r} is no {dtype.name}", place)
    return const(value, dtype)


def _call(c: Cursor, name: str, s: Scope, temps: dict[str, Expr]) -> Expr:
    place = c.place - 1
    c.expect("(")
    match name:
        case "load":
            return _load(c, s, temps)
        case "index":
            return _index(c, s, temps)
        case "ref":
            value = string_of(c)
            c.expect(",")
            dtype = dtype_of_text(c)
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
    attrs = list_of(c, lambda: attr_of(c, s), ")")
    return expr(op, *args, attrs=tuple(attrs))


def bound_of(
    c: Cursor, s: Scope, temps: dict[str, Expr]
) -> tuple[dict[str, Var], tuple[Expr, ...]]:
    """The operands of a gather, `; @0: 0..9 = value)`; the bracket is passed."""
    found: dict[str, Var] = {}
    if not c.accept(";"):
        c.expect(")")
        return found, ()

    def one() -> Expr:
        c.expect("@")
        if c.text != str(len(found)):
            c.fail(f"`{len(found)}`, the next operand")
        name = f"@{c.take()}"
        found[name] = range_of(c, name, s) if c.accept(":") else Var(name)
        c.expect("=")
        return value_of(c, s, temps)

    operands = tuple(list_of(c, one, ")"))
    return found, operands


def place_of(
    c: Cursor, s: Scope, temps: dict[str, Expr]
) -> tuple[str, tuple[Sym, ...], tuple[Expr, ...]]:
    """`%b, [@0, j]; @0: 0..9 = value)`: buffer, index and operands; the bracket is passed."""
    buffer = buffer_of(c)
    c.expect(",", "[")
    inside = c.place
    c.skip_to("]")
    c.take()
    found, bound = bound_of(c, s, temps)
    end = c.place
    c.jump(inside)  # the index, now that the bounds of its operands are known
    scope = {**s.vars, **found} if found else s.vars
    where = list_of(c, lambda: sym_of(c, scope, bool(found)), "]")
    c.jump(end)
    return buffer, tuple(where), bound


def _load(c: Cursor, s: Scope, temps: dict[str, Expr]) -> Expr:
    place = c.place
    buffer, where, bound = place_of(c, s, temps)
    if c.accept(":"):
        dtype = dtype_of_text(c)
    elif "%" + buffer in s.types:
        dtype = s.types["%" + buffer]
    else:
        raise c.error(f"%{buffer} is not defined before it is read", place)
    return load(buffer, where, dtype, bound)


def _index(c: Cursor, s: Scope, temps: dict[str, Expr]) -> Expr:
    inside = c.place
    c.skip_to(",")
    c.take()
    dtype = dtype_of_text(c)
    found, bound = bound_of(c, s, temps)
    end = c.place
    c.jump(inside)
    value = sym_of(c, {**s.vars, **found} if found else s.vars, bool(found))
    c.jump(end)
    return index(value, dtype, bound)
