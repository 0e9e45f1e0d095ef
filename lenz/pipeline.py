"""One graph from FX to a callable: each stage is one call, and this file is the list of stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lenz.codegen.llvm.compile import Library, compile_module, host_target, link
from lenz.codegen.llvm.module import emit_module
from lenz.context import Context, Trace
from lenz.frontend import FxProgram, origin
from lenz.ir.graph import Graph
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.plan import Plan
from lenz.ir.printer import show
from lenz.ir.verify import verify
from lenz.lower import lower
from lenz.opt import PASSES
from lenz.options import Options
from lenz.plan import build as build_plan
from lenz.plan import source
from lenz.runtime.loader import function
from lenz.runtime.store import store_at
from lenz.runtime.threads import imports
from lenz.schedule import schedule
from lenz.sym import SymEnv

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Everything that one compilation made, in the order it was made; the report reads this."""

    program: FxProgram
    graph: Graph
    schedule: Schedule
    plan: Plan
    text: str
    module: str
    object: bytes
    library: Library | None
    call: Boxed


def context(options: Options, trace: Trace | None = None) -> Context:
    """The context of one compilation for this machine's CPU."""
    cx = Context(options, host_target())
    return cx if trace is None else replace(cx, trace=trace)


def compile_program(program: FxProgram, cx: Context) -> Compiled:
    """FX program -> callable."""
    trace = cx.trace
    trace.text("fx", lambda: program.gm.print_readable(print_output=False))
    with trace.stage("lower"):
        g = lower(
            program.gm,
            program.name,
            program.symbols.sym,
            program.constants,
            origin,
            _env(program),
            cx.options.eager_random,
        )
    lowered = g
    trace.text("graph", lambda: show(lowered, origins=True))
    g = optimise(g, cx)
    with trace.stage("schedule"):
        s, symbols = named(schedule(g, cx))
    trace.text("schedule", lambda: show(s))
    kernels = tuple(
        {id(k): k for k in (x.kernel for x in s.steps if isinstance(x, Launch))}.values()
    )
    with trace.stage("codegen"):
        module, obj, library = _binaries(kernels, cx)
    with trace.stage("plan"):
        plan = build_plan(s, symbols, cx)
        text = source(plan, {p.name: p.source for p in program.placeholders}, g.env.hints)
        call = _load(plan, text, kernels, library, program)
    trace.text("module", lambda: module)
    trace.text("code", lambda: text)
    return Compiled(program, g, s, plan, text, module, obj, library, call)


def optimise(g: Graph, cx: Context) -> Graph:
    """Run the graph passes in their order; with option `verify`, check the graph after each."""
    if cx.options.verify:
        verify(g)
    for name, run in PASSES.items():
        with cx.trace.stage(name):
            g = run(g, cx)
        if cx.options.verify:
            verify(g)
    cx.trace.text("ir", lambda: show(g))
    return g


def named(s: Schedule) -> tuple[Schedule, dict[Launch, str]]:
    """Number the kernels; equal ones become one object, so that each is compiled once."""
    unique: dict[str, Kernel] = {}
    steps: list[Any] = []
    symbols: dict[Launch, str] = {}
    for step in s.steps:
        if isinstance(step, Launch):
            key = show(replace(step.kernel, name="k"))
            kernel = unique.get(key)
            if kernel is None:
                kernel = replace(step.kernel, name=f"{step.kernel.name}_{len(unique)}")
                unique[key] = kernel
            step = replace(step, kernel=kernel)
            symbols[step] = kernel.name
        steps.append(step)
    return replace(s, steps=tuple(steps)), symbols


def _env(program: FxProgram) -> SymEnv:
    env = SymEnv()
    for b in program.symbols.bindings:
        env = env.with_var(b.var, program.symbols.hints.get(b.var.name))
    return env


def _binaries(kernels: Sequence[Kernel], cx: Context) -> tuple[str, bytes, Library | None]:
    """Emit, compile (or find in the store) and link the kernels of one graph."""
    if not kernels:
        return "", b"", None
    text = emit_module(kernels, cx.target)
    key = hashlib.sha256(f"{cx.target.key()}\n{text}".encode()).hexdigest()
    folder = cx.options.cache_dir
    store = store_at(folder) if cx.options.cache and folder is not None else None
    obj = store.get("object", key) if store is not None else None
    if obj is None:
        with cx.trace.stage("llvm"):
            obj = compile_module(text, cx.target)
        if store is not None:
            store.put("object", key, obj)
    names = [k.name for k in kernels]
    with cx.trace.stage("link"):
        library = link(obj, names, imports())
    return text, obj, library


def _load(
    plan: Plan,
    text: str,
    kernels: Sequence[Kernel],
    library: Library | None,
    program: FxProgram,
) -> Boxed:
    """Execute the plan's module and put its kernels and constants into it."""
    module: dict[str, Any] = {"__name__": f"lenz.{plan.name}", "__file__": f"<{plan.name}>"}
    exec(compile(text, f"<lenz {plan.name}>", "exec"), module)  # text made just above, never cached
    for k in kernels:
        assert library is not None
        module[k.name] = function(library.addresses[k.name], len(k.params), len(k.sizes))
    for c in plan.constants:
        module[c.name] = _constant(program, c.name)
    for o in plan.objects:
        module["obj_" + "".join(x if x.isalnum() else "_" for x in o)] = program.modules[o]
    module["_library"] = library  # the code lives as long as the module
    call: Boxed = module["call"]
    return call


def _constant(program: FxProgram, name: str) -> torch.Tensor:
    for n in program.gm.graph.nodes:
        if n.op == "get_attr" and n.name == name:
            return program.constants[str(n.target)]
    raise KeyError(name)
