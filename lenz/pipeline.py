"""One graph from FX to a callable. Each stage is one call; this file lists the stages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from lenz.context import Context
from lenz.debug.report import TuneReport, fusions
from lenz.debug.watch import Several, Watched, Watching, ranged, shown_to, watching_of
from lenz.frontend import FxProgram
from lenz.halves import Entry
from lenz.ir.dtype import dtype_of
from lenz.ir.graph import Graph, Ref, buffers_of
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.plan import Boxed, Plan
from lenz.ir.printer import show
from lenz.ir.tensor import Layout, TensorType
from lenz.ir.verify import verify
from lenz.keys import key_of
from lenz.loading import aligned, complete, load
from lenz.lower import lower
from lenz.machines import Code, Refused, assemble, machine_of, runs_programs
from lenz.opt import PASSES
from lenz.options import Options
from lenz.perf_map import map_kernels
from lenz.plan.build import CallerFacts
from lenz.plan.build import build as build_plan
from lenz.plan.python import source
from lenz.recall import context as context
from lenz.recall import keep, recall
from lenz.records import dataclass, replace
from lenz.respecialise import Respecialised, constants_of, load_program, needs_of
from lenz.runtime.store import store_in
from lenz.schedule import schedule
from lenz.schedule.beside import share_launches
from lenz.sym import Int


@dataclass(frozen=True, slots=True)
class Compiled:
    """The products of one compilation, in order; the report reads this."""

    program: FxProgram
    graph: Graph
    schedule: Schedule
    plan: Plan
    code: Code
    call: Boxed
    tuned: tuple[TuneReport, ...] = ()

    @property
    def strides(self) -> list[tuple[int, ...] | None]:
        """The strides of each saved result, where they differ from AOTAutograd's trace."""
        buffers = buffers_of(self.graph)
        found: list[tuple[int, ...] | None] = [None] * len(self.graph.outputs)
        for k in self.program.saved:
            a, o = self.graph.outputs[k], self.program.outputs[k]
            stride = buffers[a.name].type.layout.stride if isinstance(a, Ref) else ()
            numbers = tuple(s.value for s in stride if isinstance(s, Int))
            if len(numbers) == len(stride) and stride != o.stride:
                found[k] = numbers
        return found

    @property
    def entry(self) -> Entry:
        """The entry for the disk cache."""
        return Entry(show(self.plan), self.strides, self.code.keys)

    @property
    def complete(self) -> tuple[Plan, dict[str, bytes]]:
        """The plan with constants named by content, and their bytes."""
        return complete(self.plan, constants_of(self.plan, self.program))

    @property
    def files(self) -> dict[str, bytes]:
        """All files that the plan as a script needs beside it."""
        constants = {f"{name}.constant": data for name, data in self.complete[1].items()}
        return {**self.code.files, **constants}

    def fx(self) -> GraphModule:
        """The plan as an executable FX graph."""
        # Imported here: torch takes 20 ms to register the op that such graphs launch kernels by.
        from lenz.plan.fx import graph_module
        from lenz.runtime.graph import NumberedKernel

        p, kernels = self.program, {}
        for name, (k, device) in kernels_of(self.schedule).items():
            names = [x.name for x in k.params] + [x.name for x in k.sizes]
            gpu = torch.device(device).index if runs_programs(device) else -1
            kernels[name] = NumberedKernel(self.code.functions[name], names, gpu, self.code.alive)
        values = {**{q.name: q.value for q in p.placeholders}, **dict(self.graph.env.hints)}
        constants = {n: aligned(t) for n, t in constants_of(self.plan, p).items()}
        gm = graph_module(self.plan, kernels, constants, p.modules, values)
        gm.meta["text"] = self.code.text
        return gm

    @property
    def told(self) -> str:
        """The plan as Python, with the user's line for each launch."""
        return source(self.plan, self.graph.env.hints, comments=True)


def run_of(program: FxProgram, cx: Context) -> Boxed:
    """FX program -> callable, from the cache or newly compiled."""
    key = key_of(program, cx)
    return recall(program, cx, key, run_of) or compile_program(program, cx, key).call


def compile_program(program: FxProgram, cx: Context, key: str | None = None) -> Compiled:
    """FX program -> callable, cached on disk under `key`.

    Ops whose kernel does not compile run in eager, with a warning that names the kernel. Such a
    program is not cached, so every process warns.
    """
    refused: frozenset[str] = frozenset()
    while True:
        try:
            made = _compile(program, cx, refused)
            store = store_in(cx.options)
            measured = all(t.tried[t.chosen].us is not None for t in made.tuned)
            if store is not None and key is not None and measured and not refused:
                keep(store, key, made.entry)
            return made
        except Refused as e:
            if e.is_shared:  # one of its kernels failed, and apart it fails alone
                cx = replace(cx, options=replace(cx.options, side_by_side=1))
                continue
            names = ", ".join(e.failed)
            if e.origins <= refused:
                raise
            refused |= e.origins
            message = f"lenz runs the ops of {names} in eager: the kernels do not compile: {e}"
            warnings.warn(message, stacklevel=2)


def watched(made: Compiled, cx: Context, more: Sequence[Watching] = ()) -> Compiled:
    """The same graph, watched as it runs, if options or the caller ask; its fallbacks too."""
    p, code, run = made.program, made.code, made.call
    if asked := [*watching_of(cx.options), *more]:
        again = lambda program, cx: watched(compile_program(program, cx), cx, more).call
        needs, otherwise = needs_of(made.plan, p), Respecialised(p, cx, again)
        watch = Several(Watched(p, made.plan, made.schedule, code.functions), asked)
        given = made.plan, code.functions, code.alive, needs.constants, needs.modules, otherwise
        run = shown_to(watch, load(*given, watch=watch))
    return replace(made, call=run if cx.options.ranges == "off" else ranged(run, p.name))


def _compile(program: FxProgram, cx: Context, refused: frozenset[str]) -> Compiled:
    trace = cx.trace
    trace.text("fx", lambda: program.gm.print_readable(print_output=False))
    with trace.stage("lower"):
        g = lower(program, cx, refused)
    lowered = g
    trace.text("graph", lambda: show(lowered, origins=True))
    g = optimise(g, cx, program)
    with trace.stage("schedule"):
        s = named(schedule(g, cx))
    tuned: tuple[TuneReport, ...] = ()
    if cx.options.autotune:
        with trace.stage("tune"):
            for machine in dict.fromkeys(machine_of(d) for _, d in kernels_of(s).values()):
                s, more = machine.tune(s, store_in(cx.options))
                tuned += more
    s = share_launches(s, cx)
    kernels = kernels_of(s)
    trace.text("schedule", lambda: show(s))
    trace.text("fusion", lambda: fusions(s, tuned))
    with trace.stage("codegen"):
        code_of = assemble(kernels, cx)
    with trace.stage("plan"):
        plan = build_plan(s, cx, caller_facts(program, cx.options))
    try:
        with trace.stage("codegen"):
            code = code_of()
    except Refused as e:
        mine = [x for x in s.steps if isinstance(x, Launch) and x.kernel.name in e.failed]
        e.origins = frozenset(o for x in mine for o in x.origins)
        e.is_shared = any(x.kernel.kind == "combo" for x in mine)
        raise
    with trace.stage("plan"):
        call = load_program(plan, code.functions, code.alive, program, cx, run_of)
    if cx.options.perf_map:
        map_kernels(code)
    trace.text("module", lambda: code.text)
    made = Compiled(program, g, s, plan, code, call, tuned)
    trace.text("code", lambda: source(made.complete[0], g.env.hints, comments=True))
    return made


def caller_facts(program: FxProgram, options: Options) -> CallerFacts:
    """What the caller guarantees for the arguments, and requires of the results."""
    places = program.placeholders
    graphs = options.cuda_graphs != "off" and program.kind != "body"
    return CallerFacts(
        names={p.name: p.source for p in places},
        donated=frozenset(p.name for p in places if p.is_donated),
        saved=program.kind in ("backward", "body") and not program.mutated,
        pinned=frozenset(p.name for p in places if p.is_static),
        written=frozenset(places[k].name for k in program.mutated),
        graphs=graphs,
        results=results_of(program) if graphs else (),
        kept=program.saved if graphs else (),
    )


def results_of(program: FxProgram) -> list[TensorType | None]:
    """The types of the results; None for those that are not tensors."""
    syms, found = program.symbols.syms, list[TensorType | None]()
    for o in program.outputs:
        t, made = o.value, None
        if o.node is not None and isinstance(t, torch.Tensor) and (dtype := dtype_of(t.dtype)):
            layout = Layout(syms(t.shape), syms(t.stride()))
            made = TensorType(dtype, str(t.device), layout)
        found.append(made)
    return found


def told(g: Graph, program: FxProgram) -> dict[str, Layout]:
    """The layouts that buffers must keep: as lowered, but eager's for results."""
    found = {name: b.type.layout for name, b in buffers_of(g).items()}
    for a, o in zip(g.outputs, program.outputs, strict=True):
        if isinstance(a, Ref) and isinstance(o.value, torch.Tensor):
            found[a.name] = Layout(o.shape, program.symbols.syms(o.value.stride()))
    return found


def optimise(g: Graph, cx: Context, program: FxProgram | None = None) -> Graph:
    """Run the graph passes in order; with the option `verify`, check the graph after each."""
    layouts = told(g, program) if cx.options.verify and program is not None else None
    if cx.options.verify:
        verify(g, layouts)
    for name, run in PASSES.items():
        with cx.trace.stage(name):
            g = run(g, cx)
        if cx.options.verify:
            verify(g, layouts)
    cx.trace.text("ir", lambda: show(g))
    return g


def named(s: Schedule) -> Schedule:
    """Number the kernels. Equal kernels of a device become one object, compiled once."""
    unique: dict[tuple[str, Kernel], Kernel] = {}
    steps: list[Any] = []
    for step in s.steps:
        if isinstance(step, Launch):
            key = step.device, replace(step.kernel, name="k")
            kernel = replace(step.kernel, name=f"{step.kernel.name}_{len(unique)}")
            step = replace(step, kernel=unique.setdefault(key, kernel))
        steps.append(step)
    return replace(s, steps=tuple(steps))


def kernels_of(s: Schedule) -> dict[str, tuple[Kernel, str]]:
    """The kernels by name, with their devices."""
    steps = [step for step in s.steps if isinstance(step, Launch)]
    return {step.kernel.name: (step.kernel, step.device) for step in steps}
