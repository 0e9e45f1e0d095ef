"""Text of the parts that all levels share: expressions, index expressions, types, axes, arguments.

The text of an expression is linear in its DAG: a node that is used more than once, or that stands
deeper than `MAX_DEPTH`, is printed once as a temporary `t0`, `t1`, ... in front of the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lenz.ir import op as _op
from lenz.ir.dtype import DTYPES, I64, DType
from lenz.ir.expr import Expr, is_bound_var, nodes_of, syms_of
from lenz.ir.graph import Atom, Named, ReduceKind, Ref
from lenz.ir.tensor import Axis, Layout, TensorType, axis, contiguous
from lenz.sym import Int, Sym, Var
from lenz.sym import show as show_sym

# Nesting of one expression before it is cut in two lines; bounds the recursion of the reader too.
MAX_DEPTH = 24
LINE = 100  # a body that fits in so many characters stays on the line of its node

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
_DTYPE_NAMES = frozenset(d.name for d in DTYPES)
# Words that the reader takes for something else where a temporary or a value could stand.
RESERVED = _DTYPE_NAMES | {
    "true", "false", "none", "inf", "nan", "reduce", "scan", "over", "for", "store",
}  # fmt: skip
NO_TYPES: Mapping[str, DType] = {}


def show_name(name: str) -> str:
    """A name as it stands, quoted where it is not made of letters, digits, `_` and `.`."""
    return name if _PLAIN.match(name) else json.dumps(name)


def show_range(v: Var) -> str:
    """Bounds of a variable: `0..9`, `1..`, `0..9 < s0`."""
    lo = "" if v.lo is None else str(v.lo)
    hi = "" if v.hi is None else str(v.hi)
    below = "" if v.below is None else f" < {show_sym(v.below)}"
    return f"{lo}..{hi}{below}"


def show_axis_name(a: Axis) -> str:
    """Name of an axis, with its bounds where they do not follow from the extent."""
    if axis(a.name, a.extent).var is a.var:
        return a.name
    return f"{a.name} as {show_range(a.var)}"


def show_axis(a: Axis) -> str:
    """`i: s0`."""
    return f"{show_axis_name(a)}: {show_sym(a.extent)}"


def show_layout(layout: Layout) -> str:
    """Inside of the brackets: `s0, 4`, or `s0, 4 : 8, 2 @ 1` for what is not row-major from 0."""
    sizes = ", ".join(map(show_sym, layout.shape))
    if layout == contiguous(layout.shape):
        return sizes
    strides = ", ".join(map(show_sym, layout.stride))
    offset = "" if layout.offset is Int(0) else f" @ {show_sym(layout.offset)}"
    return f"{sizes} : {strides}{offset}"


def show_type(t: TensorType, device: str) -> str:
    """`f32[s0, 4]`, with the device where it is not the usual one."""
    on = "" if t.device == device else f" on {show_word(t.device)}"
    return f"{t.dtype.name}[{show_layout(t.layout)}]{on}"


_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*(:[0-9]+)?\Z")


def show_word(text: str) -> str:
    """A word such as `cuda:0` as it stands, anything else quoted."""
    return text if _WORD.match(text) else json.dumps(text)


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
            return f"%{show_name(name)}"
        case Named(kind, value):
            return f"{kind}({show_word(value)})"
        case tuple():
            inner = ", ".join(map(show_atom, a))
            return f"({inner},)" if len(a) == 1 else f"({inner})"
        case Sym():
            return f"[{show_sym(a)}]"
    raise TypeError(f"{a!r} is not an argument")


def show_call(
    outs: list[str],
    op: str,
    args: tuple[Atom, ...],
    kwargs: tuple[tuple[str, Atom], ...],
    single: bool,
) -> tuple[str, str]:
    """The results of an eager op as `x` or `(x, y)`, and what is called."""
    head = outs[0] if len(outs) == 1 and single else f"({', '.join(outs)}{',' * (len(outs) == 1)})"
    given = [show_atom(a) for a in args] + [f"{k}={show_atom(a)}" for k, a in kwargs]
    return head, f"{show_word(op)}({', '.join(given)})" + " single" * (single and len(outs) != 1)


def show_held(holds: bool, waits: tuple[str, ...]) -> str:
    """Whether a call holds its memory, and what the calls hold that it waits for."""
    names = ", ".join("%" + show_name(name) for name in waits)
    return " holds" * holds + f" waits ({names})" * bool(waits)


def show_attr(a: Any) -> str:
    """One attribute of an op: as an argument, or a dtype by its name."""
    return a.name if isinstance(a, DType) else show_atom(a)


def acc_dtype(kind: ReduceKind, body: DType) -> DType:
    """Type of the accumulated value: i64 for a position, else the type of the body."""
    return I64 if kind in ("argmax", "argmin") else body


def _const(e: Expr) -> str:
    value, dtype = e.attrs
    if isinstance(value, bool):
        text = "true" if value else "false"
        return text if dtype.kind == "bool" else f"{text}:{dtype.name}"
    return f"{value!r}:{dtype.name}"


def show_bound(index: tuple[Sym, ...], texts: list[str]) -> str:
    """The operands of a gather, `; @0: 0..9 = text`, with the bounds that the index gives them."""
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
        if types.get(name) is e.dtype and _PLAIN.match(name) and name not in RESERVED:
            return str(name)
        return f"ref({json.dumps(name)}, {e.dtype.name})"
    if e.op is _op.INDEX:
        return f"index({show_sym(e.attrs[0])}, {e.dtype.name}{show_bound(syms_of(e), args)})"
    if e.op is _op.LOAD:
        name, where, dtype = e.attrs
        inside = ", ".join(map(show_sym, where)) + "]" + show_bound(where, args)
        suffix = "" if types.get("%" + name) is dtype else f":{dtype.name}"
        return f"load(%{show_name(name)}, [{inside}){suffix}"
    attrs = [show_attr(a) for a in e.attrs]
    if e.op.arity < 0:
        return f"{e.op.name}({', '.join(args)}{'; ' if attrs else ''}{', '.join(attrs)})"
    return f"{e.op.name}({', '.join(args + attrs)})"


def _is_short(e: Expr) -> bool:
    if e.op is _op.CONST or e.op is _op.REF:
        return True
    return e.op is _op.INDEX and isinstance(e.attrs[0], (Int, Var)) and not e.args


def lines_of(body: Expr, types: Mapping[str, DType]) -> list[str]:
    """The temporaries of an expression, one a line, then its value.

    `types` gives the dtype of each buffer (under "%name") and value that the reader knows at this
    point; what it does not know is printed with its dtype.
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
    """`{ value }` or `{ t0 = ...; value }`; over several lines where it is long.

    `indent` is the indentation of the line that the block begins on.
    """
    lines = lines_of(body, types)
    if sum(map(len, lines)) + 2 * len(lines) <= LINE:
        return "{ " + "; ".join(lines) + " }"
    return "{\n" + "".join(f"{indent}  {line}\n" for line in lines) + indent + "}"


def show_value(e: Expr, types: Mapping[str, DType], indent: str = "") -> str:
    """An expression where a value stands: plain, or a block when it has temporaries."""
    lines = lines_of(e, types)
    return lines[0] if len(lines) == 1 else show_block(e, types, indent)


def show_expr(e: Expr, types: Mapping[str, DType] = NO_TYPES) -> str:
    """Text of one expression, which `reader.read_expr` reads back."""
    return show_value(e, types)
