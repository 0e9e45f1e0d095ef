"""Checks the invariants of the IR; linear in the size of the object.

An error names the rule (`verify_rules.RULES`) and shows the line of text that breaks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lenz.errors import InternalError
from lenz.ir import graph
from lenz.ir import verify_rules as rules
from lenz.ir.dtype import BOOL, I32, I64
from lenz.ir.expr import Expr
from lenz.ir.graph import Graph
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.plan import BindSize, CallStep, Input, LaunchStep, Plan, Step, launched
from lenz.ir.printer import line_of
from lenz.ir.tensor import Axis, Buffer, Layout
from lenz.ir.verify_kernel import check_kernel
from lenz.ir.verify_rules import RULES, Broken, Held, Known, Load, broken
from lenz.sym import ZERO, Int, Sym, Var, as_multiple, prove_eq, prove_le
from lenz.sym import show as show_sym

__all__ = ["RULES", "verify"]


def verify(x: Graph | Kernel | Plan | Schedule, told: Mapping[str, Layout] | None = None) -> None:
    """Raise InternalError with the rule and the line for the first broken invariant.

    `told` are the layouts that buffers must have where code other than loops sees them: those of
    eager's tensors.
    """
    try:
        match x:
            case Graph():
                _check_graph(x)
                _check_told(x, told or {})
            case Kernel():
                check_kernel(x)
            case Plan():
                _check_plan(x)
            case Schedule():
                _check_graph(x.graph)
                _check_steps(x)
    except Broken as e:
        raise InternalError(e.what, rule=e.rule, line=line_of(x, e.culprit)) from e


def _give(syms: Iterable[Sym], d: Known, culprit: object) -> None:
    """Record sizes that an input or a call determines, with those that bound them."""
    for s in syms:
        for v in s.free_vars:
            if v in d.sizes:
                continue
            if d.names.setdefault(v.name, v) is not v:
                broken("var-once", f"the size {v.name} has two pairs of bounds", culprit)
            d.sizes[v] = None
            if v.below is not None:
                _give((v.below,), d, culprit)


def _scope(axes: tuple[Axis, ...], d: Known, culprit: object) -> set[Var]:
    """The variables in scope under some axes."""
    scope = {*d.sizes, *(a.var for a in axes)}
    for a in axes:
        d.need((a.extent,), culprit, a.name)
        if a.name in d.names:
            broken("name-once", f"the axis {a.name} has the name of a size", culprit)
    if len({a.name for a in axes}) < len(axes):
        broken("name-once", "two axes have one name", culprit)
    return scope


def _check_graph(g: Graph) -> None:
    d = Known("defined-before-use")
    written: dict[str, str] = {}
    for b in (*g.inputs, *g.constants):
        _give(b.type.layout.syms if isinstance(b, Buffer) else (b,), d, b)
        if isinstance(b, Buffer):
            d.define(b.name, b.type, b)
    for n in g.nodes:
        for name in graph.reads_of(n):
            if name in written:
                broken("mutates-last", f"%{name} was written by {written[name]}", n)
        d.walk(n)
        match n:
            case graph.Extern():
                _extern(n, d)
                written.update(dict.fromkeys(n.mutates, n.op))
                # A call may determine sizes, also by the shape of its results.
                _give((o for o in n.outs if isinstance(o, Sym)), d, n)
                _give((s for b in graph.outs_of(n) for s in b.type.layout.syms), d, n)
            case graph.View():
                _view(n, d)
            case _:
                _loop(n, d)
        for b in graph.outs_of(n):
            d.need(b.type.layout.syms, n, b.name)
            d.define(b.name, b.type, n)
    seen = {b.name for b in g.inputs if isinstance(b, Buffer)}
    if not seen.issuperset(g.unaligned):
        broken("unaligned", "only inputs may start anywhere", g.unaligned)
    for m in g.mutations:
        _mutation(m, d, seen)
        seen.remove(m.input)
    d.atoms(g.outputs, g.outputs, "output-defined")
    outputs = [*graph.atom_refs(g.outputs)]
    for name in g.free:
        if outputs.count(name) != 1:
            broken("output-free", f"%{name} leaves the graph {outputs.count(name)} times", g.free)


def _check_told(g: Graph, told: Mapping[str, Layout]) -> None:
    types = {name: b.type for name, b in graph.buffers_of(g).items()} if told else {}
    seen = [(n, name) for n in g.nodes if isinstance(n, graph.Extern) for name in graph.names_in(n)]
    outputs = [name for name in graph.atom_refs(g.outputs) if name not in g.free]
    for culprit, name in (*seen, *((g.outputs, name) for name in outputs)):
        if name not in told or ZERO in told[name].shape:
            continue
        own, want = types[name].layout.stride, told[name].stride
        gaps = [p - q for p, q in zip(own, want, strict=True)]
        if any(isinstance(s, Int) and s.value for s in gaps):
            shown = [", ".join(map(show_sym, s)) for s in (own, want)]
            broken("layout-told", f"%{name} has strides {shown[0]} and not {shown[1]}", culprit)


def _mutation(m: graph.Mutation, d: Known, inputs: set[str]) -> None:
    if m.input not in inputs:
        broken("mutation", f"%{m.input} is not an input, or is mutated twice", m)
    value, to = d.use(m.value, m), d.types[m.input]
    if value.dtype is not to.dtype:
        broken("mutation", f"%{m.input} is {to.dtype}, %{m.value} is {value.dtype}", m)
    if not _same_shape(value.shape, to.shape):
        broken("mutation", f"%{m.input} and %{m.value} have other shapes", m)


def _same_shape(a: tuple[Sym, ...], b: tuple[Sym, ...]) -> bool:
    """False if the shapes are known to differ."""
    return len(a) == len(b) and all(x is y or prove_eq(x, y) for x, y in zip(a, b, strict=True))


def _axes_match(n: graph.Loop | graph.View) -> None:
    shape = n.out.type.shape
    if len(n.axes) != len(shape):
        broken("rank", f"{len(n.axes)} axes for a result of {len(shape)} dimensions", n)
    for d, (a, size) in enumerate(zip(n.axes, shape, strict=True)):
        if isinstance(n, graph.Sort) and d == n.dim:
            if n.body.dtype not in (I32, I64) or prove_le(a.extent + 1, size):
                what = f"{show_sym(size)} of {show_sym(a.extent)} elements of {n.body.dtype}"
                broken("sort", what, n)
        elif a.extent is not size and not prove_eq(a.extent, size):
            what = f"axis {a.name} runs to {show_sym(a.extent)}, the result has {show_sym(size)}"
            broken("axes-match-out", what, n)


def _loop(n: graph.Loop, d: Known) -> None:
    scope = _scope(graph.loop_axes(n), d, n)
    if isinstance(n, graph.Scatter):
        _scatter(n, d, scope)
    else:
        _axes_match(n)
    loads: list[Load] = []

    def on_load(e: Expr) -> None:
        name, index, dtype = e.attrs
        t = d.use(name, n)
        if len(index) != t.rank:
            broken("rank", f"{len(index)} indices for %{name} of {t.rank} dimensions", n)
        if dtype is not t.dtype:
            broken("dtype", f"%{name} is {t.dtype}, loaded as {dtype}", n)
        loads.append((e, t.shape))

    bodies = graph.bodies_of(n)
    for e in bodies if isinstance(n, graph.Scatter) else bodies[:1]:
        rules.check_body(e, scope, {}, on_load, n)
    if isinstance(n, (graph.Reduction, graph.Scan)):
        if n.kind in ("any", "all") and n.body.dtype is not BOOL:
            broken("reduce-dtype", f"{n.kind} of {n.body.dtype}", n)
        acc = graph.acc_dtype(n.kind, n.body.dtype)
        rules.check_body(n.finish, _scope(n.axes, d, n), {"acc": acc}, on_load, n)
    rules.check_bounds(loads, bodies, [a.extent for a in graph.loop_axes(n)], n)
    value = bodies[-1].dtype
    if value is not n.out.dtype:
        broken("dtype", f"%{n.out.name} is {n.out.dtype}, its value {value}", n)


def _scatter(n: graph.Scatter, d: Known, scope: set[Var]) -> None:
    base = d.use(n.base, n)
    if base.dtype is not n.out.dtype or not _same_shape(base.shape, n.out.shape):
        broken("scatter-base", f"%{n.base} is {base.dtype}, or its shape not the result's", n)
    if len(n.index) != base.rank:
        broken("rank", f"{len(n.index)} indices for %{n.base} of {base.rank} dimensions", n)
    for s in n.index:
        rules.check_vars(s, scope, n, len(n.bound))
    rules.check_gather(n.index, n.bound, n)


def _view(n: graph.View, d: Known) -> None:
    source = d.use(n.source, n)
    scope = _scope(n.axes, d, n)
    _axes_match(n)
    if len(n.index) != source.rank:
        broken("rank", f"{len(n.index)} indices for %{n.source} of {source.rank} dimensions", n)
    for s in n.index:
        rules.check_vars(s, scope, n)
    if source.dtype is not n.out.dtype:
        broken("dtype", f"%{n.source} is {source.dtype}, the view {n.out.dtype}", n)
    gap = source.layout.at(n.index) - n.out.type.layout.at([a.var for a in n.axes])
    if isinstance(gap, Int) and gap.value != 0:
        broken("view-layout", f"the index lies {gap.value} elements from where the strides lead", n)


def _extern(n: graph.Extern, d: Known) -> None:
    if n.single and len(n.outs) > 1:
        broken("extern", f"{len(n.outs)} results of a call that gives one", n)
    for k, name in n.aliases:
        d.use(name, n)
        if not 0 <= k < len(n.outs):
            broken("extern", f"alias of result {k}, there are {len(n.outs)}", n)
    if n.draws == "key" and (given := graph.reads_of(n)):
        broken("key-first", f"a key depends on %{given[0]}", n)


def _check_steps(s: Schedule) -> None:
    types = {name: b.type for name, b in graph.buffers_of(s.graph).items()}
    seen: set[int] = set()
    held, roots = Held(), graph.roots_of(s.steps)
    lent = {roots.get(n, n) for n in graph.held_for_good(s.steps)}
    own = lent & {m.input for m in s.graph.mutations}  # the program writes these
    for step in s.steps:
        if isinstance(step, graph.Extern):
            memory = (roots.get(name, name) for name in graph.held_by(step))
            held.call(step.holds, memory, [b.name for b in graph.outs_of(step)], step.waits)
        if not isinstance(step, Launch):
            continue
        if id(step.kernel) not in seen:
            seen.add(id(step.kernel))
            check_kernel(step.kernel)
        if len(step.args) != len(step.kernel.params):
            broken("launch", f"{len(step.args)} for {len(step.kernel.params)} parameters", step)
        for name, p in zip(step.args, step.kernel.params, strict=True):
            if p.mode == "work":
                if name in types:
                    broken("launch", f"%{name} is a workspace, and a buffer of the graph", step)
                continue
            if name not in types:
                broken("launch", f"%{name} is not a buffer of the graph", step)
            if p.mode != "in" and roots.get(name, name) not in own:
                held.change(roots.get(name, name), step)
            type = types[name]
            if type.dtype is not p.dtype or type.device != step.device:
                what = f"%{name} is {type.dtype} on {type.device}"
                broken("launch", f"{what}, %{p.name} is {p.dtype} on {step.device}", step)


def _check_plan(p: Plan) -> None:
    m = Known("alloc-before-use")
    for i in (*p.inputs, *p.constants):
        if isinstance(i, Input):
            m.define(i.name, i.type, i)
        elif (found := as_multiple(i.value)) is not None:
            m.sizes[found[0]] = None
    for step in p.flat:
        _check_step(step, m, p)
    for name in graph.atom_refs(p.outputs):
        if name in m.dead:
            broken("output-kept", f"the output %{name} was freed or reused", p.outputs)
    m.atoms(p.outputs, p.outputs)
    if p.results and len(p.results) != len(p.outputs):
        broken("results", f"{len(p.results)} types of {len(p.outputs)} outputs", p)
    if any(k >= len(p.results) for k in p.saved):
        broken("results", f"a saved result is not one of {len(p.results)}", p)
    for name in p.kernels:
        if name not in launched(p.steps):
            broken("kernel-listed", f"@{name} is listed, but not launched", p)


def _check_step(s: Step, m: Known, p: Plan) -> None:
    m.walk(s)
    match s:
        case BindSize():
            m.sizes[s.var] = None
        case LaunchStep() if s.kernel not in p.kernels:
            broken("kernel-listed", f"@{s.kernel} is not in the list of kernels", s)
        case CallStep():
            _call(s, m)


def _call(s: CallStep, m: Known) -> None:
    outs = [o for o in s.outs if isinstance(o, str)]
    given = graph.names_in(s)
    if s.draws == "key" and given:
        broken("key-first", f"a key depends on %{given[0]}", s)
    m.held.call(s.holds, map(m.root, (*given, *outs)), outs, s.waits)
    for o in s.outs:
        if isinstance(o, Sym):
            m.sizes.update(dict.fromkeys(o.free_vars))
        elif o is not None and s.into:
            m.use(o, s)
        elif o is not None:
            m.define(o, None, s)
