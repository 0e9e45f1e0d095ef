"""Reads the text form back: `read(show(x)) == x` for graphs, kernels, plans and schedules.

By recursive descent, in time linear in the text. Scalar ops are found by name, so `lenz.ops` must
have been imported. docs/ir.md has the grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lenz.ir.dtype import DType
from lenz.ir.expr import Expr, ref
from lenz.ir.graph import (
    REDUCE_KINDS,
    SCAN_KINDS,
    UPDATE_MODES,
    Atom,
    Extern,
    Graph,
    Mutation,
    Node,
    Pointwise,
    Reduction,
    Ref,
    Scan,
    Scatter,
    Sort,
    View,
    outs_of,
)
from lenz.ir.kernel import Kernel, Launch, Rejected, Schedule
from lenz.ir.lexer import (
    Cursor,
    ReadError,
    buffer_of,
    choice_of,
    int_of,
    list_of,
    name_of,
    numbers_of,
    string_of,
    sym_of,
    tuple_of,
    word_of,
)
from lenz.ir.plan import Plan
from lenz.ir.printer_expr import acc_dtype
from lenz.ir.reader_expr import (
    Scope,
    atom_of,
    axes_of,
    block_of,
    call_args,
    header_of,
    held_of,
    place_of,
    type_of,
    value_of,
)
from lenz.ir.reader_kernel import kernel_of
from lenz.ir.reader_plan import plan_of
from lenz.ir.tensor import Axis, Buffer
from lenz.sym import Sym, SymEnv, Var


def read(text: str) -> Graph | Kernel | Plan | Schedule:
    """The object that a text stands for; raises ReadError with line, column and the line itself."""
    c = Cursor(text)
    x: Graph | Kernel | Plan | Schedule
    match choice_of(c, ("graph", "kernel", "plan", "schedule"), "what this is"):
        case "graph":
            x = _graph(c)[0]
        case "kernel":
            x = kernel_of(c)
        case "plan":
            x = plan_of(c)
        case _:
            x = _schedule(c)
    if c.kind != "end":
        c.fail("the end of the text")
    return x


def read_graph(text: str) -> Graph:
    """As `read`, for a text that must be a graph."""
    x = read(text)
    if not isinstance(x, Graph):
        raise ReadError(f"wanted a graph, this is a {type(x).__name__}", text, 0)
    return x


def read_expr(
    text: str, vars: Mapping[str, Var] | None = None, types: Mapping[str, DType] | None = None
) -> Expr:
    """One expression; `types` gives what is known of buffers ("%x") and values ("m")."""
    c = Cursor(text)
    e = value_of(c, Scope(dict(vars or {}), dict(types or {})), {})
    if c.kind != "end":
        c.fail("the end of the text")
    return e


@dataclass(slots=True)
class _Draft:
    """The parts of a graph as they are read."""

    inputs: list[Buffer | Sym] = field(default_factory=list)
    constants: list[Buffer] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    mutations: list[Mutation] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    free: tuple[str, ...] = ()
    marked: list[Atom] = field(default_factory=list)
    outputs: tuple[Atom, ...] | None = None
    ranges: tuple[Var, ...] | None = None
    hints: tuple[tuple[str, int], ...] = ()
    most: tuple[tuple[str, int], ...] = ()


def _graph(c: Cursor) -> tuple[Graph, Scope]:
    name, sizes, s = header_of(c)
    d = _Draft()
    while not c.accept("}"):
        _statement(c, s, d)
    ranges = tuple(sorted(sizes, key=lambda v: v.name)) if d.ranges is None else d.ranges
    env = SymEnv(ranges, d.hints, d.most)
    outputs = tuple(d.marked) if d.outputs is None else d.outputs
    inputs, nodes, mutations = tuple(d.inputs), tuple(d.nodes), tuple(d.mutations)
    constants, objects = tuple(d.constants), tuple(d.objects)
    g = Graph(name, inputs, nodes, outputs, mutations, constants, env, objects, d.free)
    return g, s


def _statement(c: Cursor, s: Scope, d: _Draft) -> None:
    """One line of a graph."""
    if c.text in ("%", "(", "out", "none") or c.kind == "int" or c.text in s.vars:
        _add_node(c, s, d)
        return
    words = ("in", "out", "const", "object", "free", "mutate", "return", "hint", "most", "ranges")
    place = c.place
    match choice_of(c, words, "a line of a graph"):
        case "in":
            if c.text == "%":
                d.inputs.append(_declared(c, s))
            else:
                d.inputs.append(sym_of(c, s.vars))
                c.expect(":", "size")
        case "const":
            d.constants.append(_declared(c, s))
        case "object":
            d.objects.append(name_of(c))
        case "free":
            d.free = tuple_of(c, lambda: buffer_of(c))
        case "mutate":
            to = buffer_of(c)
            c.expect("<-")
            d.mutations.append(Mutation(to, buffer_of(c)))
        case "return":
            if d.marked or d.outputs is not None:
                raise c.error("`return` beside buffers that are marked `out`", place)
            d.outputs = tuple_of(c, lambda: atom_of(c, s))
        case "hint":
            d.hints = numbers_of(c)
        case "most":
            d.most = numbers_of(c)
        case _:
            d.ranges = tuple_of(c, lambda: s.vars[choice_of(c, s.vars, "a size")])


def _declared(c: Cursor, s: Scope) -> Buffer:
    name = buffer_of(c)
    c.expect(":")
    b = Buffer(name, type_of(c, s))
    s.types["%" + name] = b.dtype
    return b


def _add_node(c: Cursor, s: Scope, d: _Draft) -> None:
    place = c.place
    marked: list[Atom] = []
    n = _node(c, s, marked)
    if marked and d.outputs is not None:
        raise c.error("`return` beside buffers that are marked `out`", place)
    d.nodes.append(n)
    d.marked.extend(marked)
    s.types.update(("%" + b.name, b.dtype) for b in outs_of(n))


def _node(c: Cursor, s: Scope, marked: list[Atom]) -> Node:
    """One node; the outputs among its results are added to `marked`."""
    results: tuple[Buffer | Sym | None, ...]
    single = not c.accept("(")
    if single:
        results = (_result(c, s, marked),)
    else:
        results = tuple(list_of(c, lambda: _result(c, s, marked), ")"))
    c.expect(":")
    kind = choice_of(
        c, ("map", "reduce", "scan", "sort", "scatter", "view", "call"), "a kind of node"
    )
    if kind == "call":
        return _extern(c, s, results, single)
    out = results[0] if results else None
    if not single or not isinstance(out, Buffer):
        raise c.error(f"`{kind}` gives one buffer")
    if kind == "map":
        axes = axes_of(c, s)
        return Pointwise(out, axes, block_of(c, s.inner(axes)))
    if kind == "reduce":
        return _reduction(c, s, out)
    if kind == "scan":
        return _scan(c, s, out)
    if kind == "sort":
        axes, dim = _along(c, s)
        return Sort(out, axes, dim, block_of(c, s.inner(axes)))
    if kind == "scatter":
        return _scatter(c, s, out)
    axes, source = axes_of(c, s), buffer_of(c)
    c.expect("[")
    inner = s.inner(axes)
    index = tuple(list_of(c, lambda: sym_of(c, inner.vars), "]"))
    return View(out, source, axes, index, c.accept("detached"))


def _reduction(c: Cursor, s: Scope, out: Buffer) -> Reduction:
    kind = choice_of(c, REDUCE_KINDS, "a kind of reduction")
    axes, raxes = axes_of(c, s, until=("|",)), axes_of(c, s, "|")
    body = block_of(c, s.inner(axes + raxes))
    acc = acc_dtype(kind, body.dtype)  # type: ignore[arg-type]  # choice_of took it from the list
    finish = _finish(c, s.inner(axes), acc)
    return Reduction(out, axes, raxes, kind, body, finish)  # type: ignore[arg-type]  # as above


def _finish(c: Cursor, s: Scope, acc: DType) -> Expr:
    """`finish { value }`, or nothing: then it is the accumulated value itself."""
    if not c.accept("finish"):
        return ref("acc", acc)
    s.types = {**s.types, "acc": acc}
    return block_of(c, s)


def _along(c: Cursor, s: Scope) -> tuple[tuple[Axis, ...], int]:
    """Axes, and the number of the one that a node works along."""
    axes = axes_of(c, s)
    c.expect("over")
    names = tuple(a.name for a in axes)
    return axes, names.index(choice_of(c, names, "an axis"))


def _scan(c: Cursor, s: Scope, out: Buffer) -> Scan:
    kind = choice_of(c, SCAN_KINDS, "a kind of scan")
    axes, dim = _along(c, s)
    reverse = c.accept("reverse")
    body = block_of(c, s.inner(axes))
    finish = _finish(c, s.inner(axes), body.dtype)
    return Scan(out, axes, dim, kind, body, finish, reverse)  # type: ignore[arg-type]  # as above


def _scatter(c: Cursor, s: Scope, out: Buffer) -> Scatter:
    mode = choice_of(c, UPDATE_MODES, "a mode of update")
    axes = axes_of(c, s)
    inner = s.inner(axes)
    c.expect("(")
    base, index, bound = place_of(c, inner, {})
    value = block_of(c, inner)
    return Scatter(out, base, axes, index, bound, value, mode)  # type: ignore[arg-type]  # as above


def _result(c: Cursor, s: Scope, marked: list[Atom]) -> Buffer | Sym | None:
    if c.accept("none"):
        return None
    is_out = c.accept("out")
    if c.text != "%":
        return sym_of(c, s.vars)
    name = buffer_of(c)
    c.expect("=")
    if is_out:
        marked.append(Ref(name))
    return Buffer(name, type_of(c, s))


def _extern(c: Cursor, s: Scope, results: tuple[Buffer | Sym | None, ...], single: bool) -> Extern:
    op = word_of(c)
    args, kwargs = call_args(c, s)
    single = c.accept("single") or single
    mutates: tuple[str, ...] = ()
    aliases: tuple[tuple[int, str], ...] = ()
    if c.accept("mutates"):
        mutates = tuple_of(c, lambda: buffer_of(c))
    if c.accept("aliases"):

        def pair() -> tuple[int, str]:
            k = int_of(c)
            c.expect(":")
            return k, buffer_of(c)

        aliases = tuple_of(c, pair)
    held = held_of(c)
    reason = string_of(c) if c.accept("because") else ""
    return Extern(results, op, args, kwargs, single, mutates, aliases, reason, *held)


def _schedule(c: Cursor) -> Schedule:
    c.expect("{", "graph")
    g, s = _graph(c)
    kernels: dict[str, Kernel] = {}
    steps: list[Launch | Extern | View] = []
    rejected: list[Rejected] = []
    while not c.accept("}"):
        place = c.place
        if c.accept("kernel"):
            k = kernel_of(c)
            kernels[k.name] = k
        elif c.accept("launch"):
            c.expect("@")
            name = choice_of(c, kernels, "a kernel") if c.kind == "word" else string_of(c)
            steps.append(Launch(kernels[name], tuple_of(c, lambda: buffer_of(c))))
        elif c.accept("reject"):
            rejected.append(Rejected(string_of(c), string_of(c), string_of(c)))
        else:
            n = _node(c, s, [])
            if not isinstance(n, (Extern, View)):
                raise c.error("a step of a schedule is a launch, a call or a view", place)
            steps.append(n)
    return Schedule(g, tuple(steps), tuple(rejected))
