"""Checks the invariants of the IR; linear in the size of the object.

An error names the rule (`verify_rules.RULES`) and shows the line of text that breaks it.
"""

from __future__ import annotations

from collections.abc import Mapping

from lenz.errors import InternalError
from lenz.ir.dtype import BOOL, I32, I64
from lenz.ir.expr import Expr
from lenz.ir.graph import (
    Atom,
    Extern,
    Graph,
    Loop,
    Mutation,
    Reduction,
    Scan,
    Scatter,
    Sort,
    View,
    acc_dtype,
    atom_refs,
    atom_syms,
    bodies_of,
    buffers_of,
    held_by,
    held_for_good,
    loop_axes,
    outs_of,
    reads_of,
    roots_of,
)
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.plan import Plan
from lenz.ir.printer import line_of
from lenz.ir.tensor import Axis, Buffer, Layout, TensorType
from lenz.ir.verify_kernel import check_kernel
from lenz.ir.verify_plan import check_plan
from lenz.ir.verify_rules import (
    RULES,
    Broken,
    Held,
    broken,
    check_body,
    check_bounds,
    check_gather,
    check_vars,
)
from lenz.sym import ZERO, Int, Sym, Var, prove_eq, prove_le
from lenz.sym import show as show_sym

__all__ = ["RULES", "verify"]


def verify(x: Graph | Kernel | Plan | Schedule, told: Mapping[str, Layout] | None = None) -> None:
    """Raise InternalError with the rule and the line for the first invariant that does not hold.

    `told` are the layouts that buffers of a graph must have where anybody but loops sees them:
    those of eager's tensors.
    """
    try:
        match x:
            case Graph():
                _check_graph(x)
                _check_told(x, told or {})
            case Kernel():
                check_kernel(x)
            case Plan():
                check_plan(x)
            case Schedule():
                _check_graph(x.graph)
                _check_steps(x)
    except Broken as e:
        raise InternalError(e.what, rule=e.rule, line=line_of(x, e.culprit)) from e


class _Graph:
    """What is defined so far."""

    def __init__(self, g: Graph) -> None:
        self.types: dict[str, TensorType] = {}
        self.sizes: dict[Var, None] = {}
        self.names: dict[str, Var] = {}
        self.written: dict[str, Extern] = {}
        for b in (*g.inputs, *g.constants):
            for s in b.type.layout.syms if isinstance(b, Buffer) else (b,):
                self.add_sizes(s, b)
            if isinstance(b, Buffer):
                self.define(b, b)

    def add_sizes(self, s: Sym, culprit: object) -> None:
        """Sizes that an input gives."""
        for v in s.free_vars:
            if v in self.sizes:
                continue
            if self.names.setdefault(v.name, v) is not v:
                broken("var-once", f"the size {v.name} has two pairs of bounds", culprit)
            self.sizes[v] = None
            if v.below is not None:
                self.add_sizes(v.below, culprit)

    def define(self, b: Buffer, culprit: object) -> None:
        """Enter a buffer."""
        if b.name in self.types:
            broken("name-once", f"%{b.name} is defined twice", culprit)
        for s in b.type.layout.syms:
            self.check_sizes(s, f"%{b.name}", culprit)
        self.types[b.name] = b.type

    def check_sizes(self, s: Sym, of: str, culprit: object) -> None:
        """Every variable of `s` is a size that is known."""
        for v in s.free_vars:
            if v not in self.sizes:
                broken("size-defined", f"nothing gives {v.name}, a size of {of}", culprit)

    def type_of(self, name: str, culprit: object) -> TensorType:
        """The type of a buffer that a node reads."""
        found = self.types.get(name)
        if found is None:
            broken("defined-before-use", f"%{name} is not defined before this", culprit)
        return found

    def axes(self, axes: tuple[Axis, ...], culprit: object) -> set[Var]:
        """The variables in scope under some axes."""
        scope = set(self.sizes)
        for a in axes:
            self.check_sizes(a.extent, f"the extent of {a.name}", culprit)
            if a.var in scope or a.name in self.names:
                broken("name-once", f"the axis {a.name} has the name of another or a size", culprit)
            scope.add(a.var)
        if len({a.name for a in axes}) < len(axes):
            broken("name-once", "two axes have one name", culprit)
        return scope

    def atom(self, a: Atom, culprit: object, rule: str) -> None:
        """An argument or output is defined."""
        for name in atom_refs(a):
            if name not in self.types:
                broken(rule, f"%{name} is not defined before this", culprit)
        for s in atom_syms(a):
            self.check_sizes(s, "this", culprit)


def _check_graph(g: Graph) -> None:
    d = _Graph(g)
    for n in g.nodes:
        for name in reads_of(n):
            if name in d.written:
                broken("mutates-last", f"%{name} was written by {d.written[name].op}", n)
        match n:
            case Extern():
                _extern(n, d)
            case View():
                _view(n, d)
            case _:
                _loop(n, d)
        for b in outs_of(n):
            d.define(b, n)
    seen: set[str] = set()
    inputs = {b.name for b in g.inputs if isinstance(b, Buffer)}
    for m in g.mutations:
        _mutation(m, d, inputs, seen)
        seen.add(m.input)
    for a in g.outputs:
        d.atom(a, g.outputs, "output-defined")
    outputs = [name for a in g.outputs for name in atom_refs(a)]
    for name in g.free:
        if outputs.count(name) != 1:
            broken("output-free", f"%{name} leaves the graph {outputs.count(name)} times", g.free)


def _check_told(g: Graph, told: Mapping[str, Layout]) -> None:
    types = {name: b.type for name, b in buffers_of(g).items()} if told else {}
    calls = [
        (n, a)
        for n in g.nodes
        if isinstance(n, Extern)
        for a in (*n.args, *dict(n.kwargs).values())
    ]
    for culprit, a in (*calls, *((g.outputs, a) for a in g.outputs)):
        for name in atom_refs(a):
            if name not in told or (culprit is g.outputs and name in g.free):
                continue
            own, want = types[name].layout.stride, told[name].stride
            gaps = [p - q for p, q in zip(own, want, strict=True)]
            has_elements = not any(n is ZERO for n in told[name].shape)
            if has_elements and any(isinstance(s, Int) and s.value for s in gaps):
                shown = [", ".join(map(show_sym, s)) for s in (own, want)]
                broken("layout-told", f"%{name} has strides {shown[0]} and not {shown[1]}", culprit)


def _mutation(m: Mutation, d: _Graph, inputs: set[str], seen: set[str]) -> None:
    if m.input not in inputs or m.input in seen:
        broken("mutation", f"%{m.input} is no input, or is mutated twice", m)
    value = d.type_of(m.value, m)
    to = d.types[m.input]
    if value.dtype is not to.dtype:
        broken("mutation", f"%{m.input} is {to.dtype}, %{m.value} is {value.dtype}", m)
    if not _same_shape(value.shape, to.shape):
        broken("mutation", f"%{m.input} and %{m.value} have other shapes", m)


def _same_shape(a: tuple[Sym, ...], b: tuple[Sym, ...]) -> bool:
    """False when the shapes are known to differ."""
    return len(a) == len(b) and all(x is y or prove_eq(x, y) for x, y in zip(a, b, strict=True))


def _axes_match(n: Loop | View) -> None:
    shape = n.out.type.shape
    if len(n.axes) != len(shape):
        broken("rank", f"{len(n.axes)} axes for a result of {len(shape)} dimensions", n)
    for d, (a, size) in enumerate(zip(n.axes, shape, strict=True)):
        if isinstance(n, Sort) and d == n.dim:
            if n.body.dtype not in (I32, I64) or prove_le(a.extent + 1, size):
                what = f"{show_sym(size)} of {show_sym(a.extent)} elements of {n.body.dtype}"
                broken("sort", what, n)
        elif a.extent is not size and not prove_eq(a.extent, size):
            what = f"axis {a.name} runs to {show_sym(a.extent)}, the result has {show_sym(size)}"
            broken("axes-match-out", what, n)


def _loop(n: Loop, d: _Graph) -> None:
    scope = d.axes(loop_axes(n), n)
    if isinstance(n, Scatter):
        _scatter(n, d, scope)
    else:
        _axes_match(n)
    loads: list[tuple[Expr, tuple[Sym, ...]]] = []

    def on_load(e: Expr) -> None:
        name, index, dtype = e.attrs
        t = d.type_of(name, n)
        if len(index) != t.rank:
            broken("rank", f"{len(index)} indices for %{name} of {t.rank} dimensions", n)
        if dtype is not t.dtype:
            broken("dtype", f"%{name} is {t.dtype}, loaded as {dtype}", n)
        loads.append((e, t.shape))

    bodies = bodies_of(n)
    for e in bodies if isinstance(n, Scatter) else bodies[:1]:
        check_body(e, scope, {}, on_load, n)
    if isinstance(n, (Reduction, Scan)):
        if n.kind in ("any", "all") and n.body.dtype is not BOOL:
            broken("reduce-dtype", f"{n.kind} of {n.body.dtype}", n)
        kind = n.body.dtype if isinstance(n, Scan) else acc_dtype(n.kind, n.body.dtype)
        check_body(n.finish, d.axes(n.axes, n), {"acc": kind}, on_load, n)
    check_bounds(loads, bodies, [a.extent for a in loop_axes(n)], n)
    value = bodies[-1].dtype
    if value is not n.out.dtype:
        broken("dtype", f"%{n.out.name} is {n.out.dtype}, its value {value}", n)


def _scatter(n: Scatter, d: _Graph, scope: set[Var]) -> None:
    base = d.type_of(n.base, n)
    if base.dtype is not n.out.dtype or not _same_shape(base.shape, n.out.shape):
        broken(
            "scatter-base", f"%{n.base} is {base.dtype}, or has another shape than the result", n
        )
    if len(n.index) != base.rank:
        broken("rank", f"{len(n.index)} indices for %{n.base} of {base.rank} dimensions", n)
    for s in n.index:
        check_vars(s, scope, n, len(n.bound))
    check_gather(n.index, n.bound, n)


def _view(n: View, d: _Graph) -> None:
    source = d.type_of(n.source, n)
    scope = d.axes(n.axes, n)
    _axes_match(n)
    if len(n.index) != source.rank:
        broken("rank", f"{len(n.index)} indices for %{n.source} of {source.rank} dimensions", n)
    for s in n.index:
        check_vars(s, scope, n)
    if source.dtype is not n.out.dtype:
        broken("dtype", f"%{n.source} is {source.dtype}, the view {n.out.dtype}", n)
    gap = source.layout.at(n.index) - n.out.type.layout.at([a.var for a in n.axes])
    if isinstance(gap, Int) and gap.value != 0:
        broken("view-layout", f"the index lies {gap.value} elements from where the strides lead", n)


def _extern(n: Extern, d: _Graph) -> None:
    for a in (*n.args, *(a for _, a in n.kwargs)):
        d.atom(a, n, "defined-before-use")
    if n.single and len(n.outs) > 1:
        broken("extern", f"{len(n.outs)} results of a call that gives one", n)
    for o in n.outs:
        if isinstance(o, Sym):
            d.add_sizes(o, n)
    for b in outs_of(n):
        for s in b.type.layout.syms:
            d.add_sizes(s, n)  # a call may give sizes by the shape of its results
    for name in n.mutates:
        d.type_of(name, n)
        d.written[name] = n
    for name in n.waits:
        d.type_of(name, n)
    for k, name in n.aliases:
        d.type_of(name, n)
        if not 0 <= k < len(n.outs):
            broken("extern", f"alias of result {k}, there are {len(n.outs)}", n)


def _check_steps(s: Schedule) -> None:
    given = (*s.graph.inputs, *s.graph.constants)
    types = {b.name: b.dtype for b in given if isinstance(b, Buffer)}
    for n in s.graph.nodes:
        types.update((b.name, b.dtype) for b in outs_of(n))
    seen: set[int] = set()
    held, roots = Held(), roots_of(s.steps)
    lent = {roots.get(n, n) for n in held_for_good(s.steps)}
    own = lent & {m.input for m in s.graph.mutations}  # the program writes these
    for step in s.steps:
        if isinstance(step, Extern):
            memory = (roots.get(name, name) for name in held_by(step))
            held.call(step.holds, memory, [b.name for b in outs_of(step)], step.waits)
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
                broken("launch", f"%{name} is no buffer of the graph", step)
            if p.mode != "in" and roots.get(name, name) not in own:
                held.change(roots.get(name, name), step)
            if types[name] is not p.dtype:
                broken("launch", f"%{name} is {types[name]}, %{p.name} is {p.dtype}", step)
