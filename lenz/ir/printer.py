"""The text form of graphs, kernels, plans and schedules: debug print, golden and cache key in one.

Canonical: equal objects give equal text, with no address, clock or path in it. `read(show(g)) == g`
for everything that `verify` accepts; what it does not accept prints as well. docs/ir.md has the
grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from lenz.ir.dtype import DType
from lenz.ir.expr import Expr, is_bound_var, nodes_of, ref, syms_of
from lenz.ir.graph import (
    Extern,
    Graph,
    Node,
    Pointwise,
    Reduction,
    Ref,
    Scan,
    Scatter,
    Sort,
    View,
    atom_syms,
    bodies_of,
    loop_axes,
    origin_of,
    outs_of,
)
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.lines import Lines
from lenz.ir.plan import Plan
from lenz.ir.printer_expr import (
    NO_TYPES,
    acc_dtype,
    show_atom,
    show_axis,
    show_block,
    show_bound,
    show_call,
    show_expr,
    show_held,
    show_name,
    show_range,
    show_type,
    show_value,
    show_word,
)
from lenz.ir.printer_kernel import kernel_lines
from lenz.ir.printer_plan import plan_lines
from lenz.ir.tensor import Axis, Buffer
from lenz.sym import Sym, SymEnv, Var
from lenz.sym import show as show_sym

__all__ = ["lines_of_object", "show", "show_expr", "show_node", "sizes_of"]


def show(x: Graph | Kernel | Plan | Schedule, origins: bool = False) -> str:
    """The text of an object; `origins` adds where each line came from, as comments."""
    return lines_of_object(x, origins).text()


def lines_of_object(x: Graph | Kernel | Plan | Schedule, origins: bool = False) -> Lines:
    """The text of an object by lines, which know the node or statement that each begins."""
    match x:
        case Graph():
            out = Lines()
            _graph(x, out, origins)
            return out
        case Kernel():
            return kernel_lines(x, Lines())
        case Plan():
            return plan_lines(x, Lines(), origins)
        case Schedule():
            out = Lines()
            _schedule(x, out, origins)
            return out
    raise TypeError(f"{type(x).__name__} has no text form")


def device_of(g: Graph) -> str:
    """The device in the header of a graph: that of its first buffer; "" when it has none."""
    for b in g.inputs:
        if isinstance(b, Buffer):
            return b.type.device
    for b in g.constants:
        return b.type.device
    for n in g.nodes:
        for out in outs_of(n):
            return out.type.device
    return ""


def _node_syms(n: Node) -> Iterator[tuple[Sym, frozenset[Var]]]:
    """Every Sym of a node with the variables that its axes bind."""
    none: frozenset[Var] = frozenset()
    axes: tuple[Axis, ...] = ()
    bodies: tuple[Expr, ...] = ()
    index: tuple[Sym, ...] = ()
    match n:
        case Pointwise() | Reduction() | Scan() | Sort() | Scatter():
            axes, bodies = loop_axes(n), bodies_of(n)
            index = n.index if isinstance(n, Scatter) else ()
        case View():
            axes, index = n.axes, n.index
        case Extern():
            for out in n.outs:
                if isinstance(out, Sym):
                    yield out, none
            for a in (*n.args, *(a for _, a in n.kwargs)):
                yield from ((s, none) for s in atom_syms(a))
    for b in outs_of(n):
        yield from ((s, none) for s in b.type.layout.syms)
    for axis in axes:
        yield axis.extent, none
    bound = frozenset(axis.var for axis in axes)
    for e in nodes_of(*bodies):
        for s in syms_of(e):
            yield s, bound
    for s in index:
        yield s, bound


def sizes_of(g: Graph) -> tuple[Var, ...]:
    """The size variables of a graph in order of first use, each after those that bound it."""
    found: dict[Var, None] = {}

    def take(s: Sym, bound: frozenset[Var]) -> None:
        for v in s.free_vars:
            if v in found or v in bound:
                continue
            if v.below is not None:
                take(v.below, bound)
            if not is_bound_var(v):
                found[v] = None

    empty: frozenset[Var] = frozenset()
    for b in (*g.inputs, *g.constants):
        for s in b.type.layout.syms if isinstance(b, Buffer) else (b,):
            take(s, empty)
    for n in g.nodes:
        for s, bound in _node_syms(n):
            take(s, bound)
    for a in g.outputs:
        for s in atom_syms(a):
            take(s, empty)
    for v in g.env.ranges:
        take(v, empty)
    return tuple(found)


def _marked_outputs(g: Graph) -> tuple[frozenset[str], bool]:
    """Names marked `out`, and whether they are all there is to say about the outputs."""
    names = [b.name for n in g.nodes for b in outs_of(n)]
    refs = [a.name for a in g.outputs if isinstance(a, Ref)]
    wanted = frozenset(refs)
    if len(refs) != len(g.outputs) or [n for n in names if n in wanted] != refs:
        return frozenset(), False
    return wanted, True


def _env(env: SymEnv, sizes: tuple[Var, ...], out: Lines) -> None:
    """What is known of the sizes beyond their ranges, which stand in the header."""
    if env.ranges != tuple(sorted(sizes, key=lambda v: v.name)):
        out.add(f"ranges ({', '.join(v.name for v in env.ranges)})")
    if env.hints:
        out.add(f"hint ({', '.join(f'{name}: {value}' for name, value in env.hints)})")
    if env.most:
        out.add(f"most ({', '.join(f'{name}: {value}' for name, value in env.most)})")


def _graph(g: Graph, out: Lines, origins: bool) -> None:
    device = device_of(g)
    sizes = sizes_of(g)
    header = ", ".join(f"{v.name}: {show_range(v)}" for v in sizes)
    on = f" on {show_word(device)}" if device else ""
    with out.block(f"graph @{show_name(g.name)}({header}){on}", g):
        _env(g.env, sizes, out)
        for name in g.objects:
            out.add(f"object {show_name(name)}")
        for b in g.inputs:
            if isinstance(b, Buffer):
                out.add(f"in {_buffer(b, device)}", b, b.origin if origins else ())
            else:
                out.add(f"in {show_sym(b)} : size", b)
        for b in g.constants:
            out.add(f"const {_buffer(b, device)}", b, b.origin if origins else ())
        outputs, complete = _marked_outputs(g)
        types = {"%" + b.name: b.dtype for b in (*g.inputs, *g.constants) if isinstance(b, Buffer)}
        for n in g.nodes:
            mark = "out " if not isinstance(n, Extern) and n.out.name in outputs else ""
            origin = origin_of(n) if origins else ()
            out.add(mark + show_node(n, device, types, out.indent, outputs), n, origin)
            types.update(("%" + b.name, b.dtype) for b in outs_of(n))
        if g.free:
            out.add(f"free ({', '.join('%' + show_name(name) for name in g.free)})", g.free)
        for m in g.mutations:
            out.add(f"mutate %{show_name(m.input)} <- %{show_name(m.value)}", m)
        if not complete:
            out.add(f"return ({', '.join(map(show_atom, g.outputs))})", g.outputs)


def _buffer(b: Buffer, device: str) -> str:
    return f"%{show_name(b.name)} : {show_type(b.type, device)}"


def _axes(axes: tuple[Axis, ...]) -> str:
    return ", ".join(map(show_axis, axes))


def show_node(
    n: Node,
    device: str = "",
    types: Mapping[str, DType] = NO_TYPES,
    indent: str = "",
    outputs: frozenset[str] = frozenset(),
) -> str:
    """One node: the line that stands for it in a graph, without the word `out` in front."""
    if isinstance(n, Extern):
        return show_extern(n, device, outputs)
    head = f"%{show_name(n.out.name)} = {show_type(n.out.type, device)}"
    match n:
        case Pointwise():
            return f"{head} : map ({_axes(n.axes)}) {show_block(n.body, types, indent)}"
        case View():
            index = ", ".join(map(show_sym, n.index))
            line = f"{head} : view ({_axes(n.axes)}) %{show_name(n.source)}[{index}]"
            return line + " detached" * n.detached
        case Sort():
            line = f"{head} : sort ({_axes(n.axes)}) over {n.axes[n.dim].name}"
            return f"{line} {show_block(n.body, types, indent)}"
        case Scatter():
            index = ", ".join(map(show_sym, n.index))
            bound = show_bound(n.index, [show_value(e, types, indent) for e in n.bound])
            line = f"{head} : scatter {n.mode} ({_axes(n.axes)})"
            line += f" (%{show_name(n.base)}, [{index}]{bound})"
            return f"{line} {show_block(n.value, types, indent)}"
        case Reduction():
            line = f"{head} : reduce {n.kind} ({_axes(n.axes)} | {_axes(n.raxes)})"
            acc = acc_dtype(n.kind, n.body.dtype)
        case Scan():
            turn = " reverse" if n.reverse else ""
            line = f"{head} : scan {n.kind} ({_axes(n.axes)}) over {n.axes[n.dim].name}{turn}"
            acc = n.body.dtype
    line = f"{line} {show_block(n.body, types, indent)}"
    if n.finish is ref("acc", acc):
        return line
    return f"{line} finish {show_block(n.finish, {**types, 'acc': acc}, indent)}"


def show_extern(n: Extern, device: str = "", outputs: frozenset[str] = frozenset()) -> str:
    """A call of an eager op."""
    outs = []
    for o in n.outs:
        if isinstance(o, Buffer):
            mark = "out " if o.name in outputs else ""
            outs.append(f"{mark}%{show_name(o.name)} = {show_type(o.type, device)}")
        else:
            outs.append("none" if o is None else show_sym(o))
    head, call = show_call(outs, n.op, n.args, n.kwargs, n.single)
    line = f"{head} : call {call}"
    if n.mutates:
        line += f" mutates ({', '.join('%' + show_name(m) for m in n.mutates)})"
    if n.aliases:
        line += f" aliases ({', '.join(f'{k}: %{show_name(b)}' for k, b in n.aliases)})"
    line += show_held(n.holds, n.waits)
    return f"{line} because {json.dumps(n.reason)}" if n.reason else line


def _schedule(s: Schedule, out: Lines, origins: bool) -> None:
    device = device_of(s.graph)
    defined: dict[str, Kernel] = {}
    with out.block("schedule", s):
        _graph(s.graph, out, origins)
        for step in s.steps:
            if isinstance(step, Launch):
                k = step.kernel
                if defined.get(k.name) != k:
                    kernel_lines(k, out)
                    defined[k.name] = k
                args = ", ".join("%" + show_name(a) for a in step.args)
                line = f"launch @{show_name(k.name)}({args})"
                out.add(line, step, step.origins if origins else ())
            else:
                out.add(show_node(step, device), step, origin_of(step) if origins else ())
        for r in s.rejected:
            out.add("reject " + " ".join(map(json.dumps, (r.first, r.second, r.why))), r)
