"""The text form of graphs, kernels, plans and schedules: debug print, test data and cache key.

Canonical: equal objects give equal text, without addresses, times or paths. `read(show(g)) == g`
for everything that `verify` accepts; other objects print as well. docs/ir.md has the grammar, and
syntax.py says where it is declared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from lenz.ir.dtype import DType
from lenz.ir.expr import Expr, all_syms, is_bound_var
from lenz.ir.form import CULPRIT
from lenz.ir.forms import FORMS, GRAPH, PLAN
from lenz.ir.graph import Graph, Node, Ref, origin_of, outs_of
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.plan import Plan, flat, launched
from lenz.ir.tensor import Axis, Buffer, TensorType
from lenz.ir.text import Scope, show_name, show_size, show_word
from lenz.ir.text_expr import NO_TYPES, show_expr
from lenz.sym import Sym, Var

NODES = get_args(Node)
__all__ = ["line_of", "show", "show_expr", "show_node", "sizes_of"]


def show(x: Graph | Kernel | Plan | Schedule, origins: bool = False) -> str:
    """The text of an object; `origins` adds the origin of each line as a comment."""
    return "\n".join(_rows(x, Scope(), origins)) + "\n"


def line_of(x: Graph | Kernel | Plan | Schedule, culprit: object) -> str:
    """The line of a part of an object, with its number; "" if there is none."""
    rows = "\n".join(_rows(x, Scope(culprit=culprit), origins=False)).split("\n")
    at = next((k for k, row in enumerate(rows) if CULPRIT in row), None)
    return "" if at is None else f"{at + 1}: {rows[at].replace(CULPRIT, '').strip()}"


def show_node(x: Any, types: Mapping[str, DType] = NO_TYPES) -> str:
    """The line of one node, statement or step, without a leading `out`."""
    return FORMS[type(x)].show(x, Scope(types=dict(types)))


def _rows(x: Graph | Kernel | Plan | Schedule, s: Scope, origins: bool) -> Iterator[str]:
    """The lines of an object."""
    match x:
        case Graph():
            sizes = sizes_of(x)
            return _block(_header("graph", x, sizes, s), _graph(x, sizes, s, origins), x, s)
        case Kernel():
            return iter((s.indent + FORMS[Kernel].show(x, s),))
        case Plan():
            return _block(_header("plan", x, sizes_of(x), s), _plan(x, s, origins), x, s)
        case Schedule():
            return _block("schedule", _schedule(x, s, origins), x, s)
    raise TypeError(f"{type(x).__name__} has no text form")


def _block(head: str, rows: Iterable[str], x: object, s: Scope) -> Iterator[str]:
    """`head {`, indented rows, `}`."""
    outer = s.indent
    yield f"{outer}{CULPRIT * (x is s.culprit)}{head} {{"
    s.indent = outer + "  "
    yield from rows
    s.indent = outer
    yield outer + "}"


def _header(word: str, x: Graph | Plan, sizes: tuple[Var, ...], s: Scope) -> str:
    """`graph @g(s0: 1..) on cpu`; the device is that of the first buffer."""
    made = x.flat if isinstance(x, Plan) else [b for n in x.nodes for b in outs_of(n)]
    typed = [b.type for b in (*x.inputs, *x.constants, *made) if hasattr(b, "type")]
    s.device = typed[0].device if typed else ""
    given = ", ".join([show_size(v) for v in sizes])
    on = f" on {show_word(s.device)}" if s.device else ""
    return f"{word} @{show_name(x.name)}({given}){on}"


def sizes_of(x: Graph | Plan) -> tuple[Var, ...]:
    """The sizes of a graph or plan in order of first use, each after its bounds."""
    found: dict[Var, None] = {}
    axes: set[Var] = set()

    def take(s: Sym) -> None:
        for v in s.free_vars:
            if v not in found and v not in axes:
                if v.below is not None:
                    take(v.below)
                if not is_bound_var(v):
                    found[v] = None

    def walk(part: Any) -> None:
        kind = type(part)
        if kind is tuple:
            for one in part:
                walk(one)
        elif kind is TensorType:
            for s in part.layout.syms:
                if s.free_vars:
                    take(s)
        elif kind is Axis:
            take(part.extent)
            axes.add(part.var)
        elif kind is Expr:
            for s in all_syms(part):
                take(s)
        elif kind in FORMS:
            for get in FORMS[kind].sized:
                walk(get(part))
        elif isinstance(part, Sym):
            take(part)

    if isinstance(x, Graph):
        walk((x.inputs, x.constants, x.nodes, x.outputs, x.env.ranges))
    else:
        walk((x.inputs, x.constants, x.steps, x.outputs, x.results))
    return tuple(found)


def _graph(g: Graph, sizes: tuple[Var, ...], s: Scope, origins: bool) -> Iterator[str]:
    hidden = set()
    if g.env.ranges == tuple(sorted(sizes, key=lambda v: v.name)):
        hidden.add("env.ranges")
    names = [b.name for n in g.nodes for b in outs_of(n)]
    refs = [a.name for a in g.outputs if isinstance(a, Ref)]
    if len(refs) == len(g.outputs) and [n for n in names if n in set(refs)] == refs:
        hidden.add("outputs")  # marked where they are defined
        s.outputs = dict.fromkeys(refs)
    for x, row in GRAPH.rows(g, s, hidden):
        yield s.indent + row + (_origins(x) if origins else "")


def _origins(x: Any) -> str:
    """The origin of a line, as a comment."""
    match x:
        case Launch():
            found = x.origins
        case Buffer():
            found = x.origin
        case _:
            found = origin_of(x) if isinstance(x, NODES) else ()
    return f"  # from {', '.join(found)}" if found else ""


def _plan(p: Plan, s: Scope, origins: bool) -> Iterator[str]:
    comments: dict[int, list[str]] = {}
    steps = p.flat
    for at, text in p.comments if origins else ():
        comments.setdefault(id(steps[at]), []).extend(text.split("\n"))
    hidden = {"kernels"} if p.kernels == launched(p.steps) else ()
    for x, row in PLAN.rows(p, s, hidden):
        told = [text for one in flat((x,)) for text in comments.pop(id(one), ())]
        yield from [f"{s.indent}# {text}" for text in told]
        yield s.indent + row


def _schedule(x: Schedule, s: Scope, origins: bool) -> Iterator[str]:
    yield from _rows(x.graph, s, origins)
    defined: dict[str, Kernel] = {}
    s = Scope(device=s.device, indent=s.indent, culprit=s.culprit)
    for step in (*x.steps, *x.rejected):
        if isinstance(step, Launch) and defined.get(step.kernel.name) != step.kernel:
            defined[step.kernel.name] = step.kernel
            yield from _rows(step.kernel, Scope(indent=s.indent, culprit=s.culprit), origins)
        yield s.indent + FORMS[type(step)].show(step, s) + (_origins(step) if origins else "")
