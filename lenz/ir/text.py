"""Text of parts shared by all levels: names, sizes, types, axes, arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import reduce
from typing import Any, cast

from lenz.ir import lexer
from lenz.ir.dtype import BY_NAME, DType
from lenz.ir.graph import Atom, Named, Ref
from lenz.ir.lexer import Cursor
from lenz.ir.tensor import Axis, Layout, TensorType, axis, contiguous, contiguous_strides
from lenz.records import dataclass, field, replace
from lenz.sym import ZERO, Int, Sym, Var, minimum
from lenz.sym import show as show_sym

WORDS: Mapping[str, Atom] = {
    "true": True, "false": False, "none": None, "inf": float("inf"), "nan": float("nan"),
}  # fmt: skip
_NAMED = ("dtype", "device", "layout", "memory_format", "op", "obj")
PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*(:[0-9]+)?\Z")


@dataclass(slots=True)
class Scope:
    """The state of a printer or reader at one place of the text.

    `types` has the dtype of each defined buffer (under "%name") and value; others are printed with
    their dtype. `indent` is the line's, `outputs` are the buffers marked `out`, `kernels` a
    schedule's. `culprit` is the object whose line an error shows.
    """

    vars: dict[str, Var] = field(default_factory=dict)  # sizes, axes
    types: dict[str, DType] = field(default_factory=dict)
    device: str = ""
    depth: int = 0
    indent: str = ""
    outputs: dict[str, None] = field(default_factory=dict)
    culprit: object = None
    kernels: dict[str, Any] = field(default_factory=dict)


def show_name(name: str) -> str:
    """A name, quoted unless it consists of letters, digits, `_` and `.`."""
    return name if PLAIN.match(name) else json.dumps(name)


def show_buffer(name: str) -> str:
    """`%x`."""
    return "%" + show_name(name)


def show_word(text: str) -> str:
    """A word such as `cuda:0`, anything else quoted."""
    return text if _WORD.match(text) else json.dumps(text)


def show_range(v: Var) -> str:
    """Bounds of a variable: `0..9`, `1..`, `0..9 < s0`."""
    lo = "" if v.lo is None else str(v.lo)
    hi = "" if v.hi is None else str(v.hi)
    return f"{lo}..{hi}" + ("" if v.below is None else f" < {show_sym(v.below)}")


def range_of(c: Cursor, name: str, s: Scope) -> Var:
    """Bounds of a variable of this name."""
    lo = None if c.text == ".." else lexer.int_of(c)
    c.expect("..")
    hi = lexer.int_of(c) if c.kind == "int" or c.text == "-" else None
    return Var(name, lo, hi, lexer.sym_of(c, s.vars) if c.accept("<") else None)


def show_size(v: Var) -> str:
    """`s0: 1..`."""
    return f"{v.name}: {show_range(v)}"


def size_of(c: Cursor, s: Scope) -> Var:
    """A declared size, which enters the scope."""
    name = lexer.name_of(c)
    c.expect(":")
    v = s.vars[name] = range_of(c, name, s)
    return v


def var_of(c: Cursor, s: Scope, what: str = "a size") -> Var:
    """A variable that is in scope."""
    return s.vars[lexer.choice_of(c, s.vars, what)]


def show_axis(a: Axis, between: str = ": ") -> str:
    """`i: s0`, or `i as 0..9: s0` where the bounds do not follow from the extent.

    Lanes of which not all run: `r0 in 1024 below s0`.
    """
    own = axis(a.name, a.extent).var is a.var
    name = a.name if own else f"{a.name} as {show_range(a.var)}"
    below = f"{a.width} below {', '.join(map(show_sym, a.ends))}"
    return name + between + (below if a.ends else show_sym(a.extent))


def axis_of(c: Cursor, s: Scope, between: str = ":") -> Axis:
    """An axis."""
    name = lexer.name_of(c)
    given = range_of(c, name, s) if c.accept("as") else None
    c.expect(between)
    extent, ends = lexer.sym_of(c, s.vars), list[Sym]()
    if between == "in" and c.accept("below"):
        ends = lexer.items_of(c, lambda: lexer.sym_of(c, s.vars), ":")
    least = reduce(minimum, ends, extent)
    a = axis(name, least) if given is None else Axis(given, least)
    is_lane = ends or c.words[c.place : c.place + 2] == [":", "lane"]
    width = extent.value if is_lane and isinstance(extent, Int) else 0
    return replace(a, width=width, ends=tuple(ends))


def show_layout(layout: Layout) -> str:
    """The text in brackets: `s0, 4`, or `s0, 4 : 8, 2 @ 1` if it is not row-major from 0."""
    sizes = ", ".join([show_sym(s) for s in layout.shape])
    if layout == contiguous(layout.shape):
        return sizes
    strides = ", ".join([show_sym(s) for s in layout.stride])
    offset = "" if layout.offset is ZERO else f" @ {show_sym(layout.offset)}"
    return f"{sizes} : {strides}{offset}"


def show_type(t: TensorType, s: Scope) -> str:
    """`f32[s0, 4]`, with the device if it is not the default one."""
    on = "" if t.device == s.device else f" on {show_word(t.device)}"
    return f"{t.dtype.name}[{show_layout(t.layout)}]{on}"


def dtype_of(c: Cursor) -> DType:
    """An element type by name."""
    return BY_NAME[lexer.choice_of(c, BY_NAME, "an element type")]


def type_of(c: Cursor, s: Scope) -> TensorType:
    """`f32[s0, 4 : 8, 2 @ 1] on cuda:0`."""
    dtype = dtype_of(c)
    c.expect("[")

    def size() -> Sym:
        return lexer.sym_of(c, s.vars)

    shape = tuple(lexer.items_of(c, size, "]", ":", "@"))
    stride = contiguous_strides(shape)
    place = c.place
    if c.accept(":"):
        stride = tuple(lexer.items_of(c, size, "]", "@"))
        if len(stride) != len(shape):
            raise c.error(f"{len(shape)} sizes but {len(stride)} strides", place)
    offset = size() if c.accept("@") else ZERO
    c.expect("]")
    device = lexer.word_of(c) if c.accept("on") else s.device
    return TensorType(dtype, device, Layout(shape, stride, offset))


def number_of(c: Cursor) -> int | float:
    """A number, exact as in `repr`; inf and nan by name."""
    sign = -1 if c.accept("-") else 1
    if c.kind == "int":
        return sign * int(c.take())
    if c.kind != "float" and c.text not in ("inf", "nan"):
        c.fail("a number")
    return sign * float(c.take())


def show_atom(a: Atom) -> str:
    """One argument of a call or one output."""
    match a:
        case None:
            return "none"
        case bool():
            return "true" if a else "false"
        case int() | float():
            return repr(a)
        case complex():
            return f"complex({a.real!r}, {a.imag!r})"
        case str():
            return json.dumps(a)
        case Ref(name):
            return show_buffer(name)
        case Named(kind, value):
            return f"{kind}({show_word(value)})"
        case tuple():
            inner = ", ".join(map(show_atom, a))
            return f"({inner},)" if len(a) == 1 else f"({inner})"
        case Sym():
            return f"[{show_sym(a)}]"
    raise TypeError(f"{a!r} is not an argument")


def atom_of(c: Cursor, s: Scope) -> Atom:
    """One argument of a call or one output."""
    if c.kind == "string":
        return lexer.string_of(c)
    if c.text == "%":
        return Ref(lexer.buffer_of(c))
    if c.accept("("):
        return tuple(lexer.list_of(c, lambda: atom_of(c, s), ")"))
    if c.text == "[":
        return lexer.enclosed(c, lambda: lexer.sym_of(c, s.vars))
    if c.text in WORDS:
        return WORDS[c.take()]
    if c.accept("complex"):
        c.expect("(")
        real, imag = lexer.list_of(c, lambda: number_of(c), ")")
        return complex(real, imag)
    if c.kind == "word":
        kind = lexer.choice_of(c, _NAMED, "an argument")
        return Named(cast(Any, kind), lexer.enclosed(c, lambda: lexer.word_of(c), "()"))
    return number_of(c)
