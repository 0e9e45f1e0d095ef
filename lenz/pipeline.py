"""One graph from FX to a callable: each stage is one call, and this file is the list of stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lenz.assemble import Code, Refused, assemble, check_gpus, store_of
from lenz.codegen.llvm.compile import host_target
from lenz.context import Context, Trace
from lenz.debug.report import TuneReport
from lenz.frontend import FxProgram, origin
from lenz.ir.graph import Graph, Ref, buffers_of
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.plan import Plan
from lenz.ir.printer import show
from lenz.ir.verify import verify
from lenz.lower import lower
from lenz.opt import PASSES
from lenz.options import Options
from lenz.plan import build as build_plan
from lenz.plan import source
from lenz.schedule import schedule
from lenz.sym import ONE, Int, SymEnv
from lenz.tune.search import tune
from lenz.tune.space import space

Boxed = Callable[[list[Any]], Sequence[Any]]
DEVICES = frozenset({"cpu", "cuda"})  # that kernels are made for


@dataclass(frozen=True, slots=True)
class Compiled:
    """Everything that one compilation made, in the order it was made; the report reads this."""

    program: FxProgram
    graph: Graph
    schedule: Schedule
    plan: Plan
    text: str
    code: Code
    call: Boxed
    tuned: tuple[TuneReport, ...] = ()

    @property
    def strides(self) -> list[tuple[int, ...] | None]:
        """For each result the strides it has, where they differ from what the program says."""
        buffers = buffers_of(self.graph)
        found: list[tuple[int, ...] | None] = [None] * len(self.graph.outputs)
        for k in self.program.saved:
            a, o = self.graph.outputs[k], self.program.outputs[k]
            stride = buffers[a.name].type.layout.stride if isinstance(a, Ref) else ()
            numbers = tuple(s.value for s in stride if isinstance(s, Int))
            pairs = zip(o.shape, stride, o.stride, strict=True) if stride else ()
            if any(x is not y and n is not ONE for n, x, y in pairs) and len(numbers) == len(
                stride
            ):
                found[k] = numbers
        return found


def context(options: Options, trace: Trace | None = None) -> Context:
    """The context of one compilation for this machine's CPU."""
    cx = Context(options, host_target())
    return cx if trace is None else replace(cx, trace=trace)


def compile_program(program: FxProgram, cx: Context) -> Compiled:
    """FX program -> callable.

    Ops whose kernel does not compile run in eager, with a warning that names the kernel.
    """
    refused: frozenset[str] = frozenset()
    while True:
        try:
            return _compile(program, cx, refused)
        except Refused as e:
            names = ", ".join(k.name for k, _ in e.failed)
            ops = frozenset(o for k, _ in e.failed for o in k.origins)
            if ops <= refused:
                raise
            refused |= ops
            message = f"lenz runs the ops of {names} in eager, which do not compile: {e}"
            warnings.warn(message, stacklevel=2)


def _compile(program: FxProgram, cx: Context, refused: frozenset[str]) -> Compiled:
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
            DEVICES,
            refused,
            program.saved,
        )
    check_gpus([b.type.device for b in buffers_of(g).values()])
    lowered = g
    trace.text("graph", lambda: show(lowered, origins=True))
    g = optimise(g, cx)
    with trace.stage("schedule"):
        s = named(schedule(g, cx, space if cx.options.autotune else None))
    tuned: tuple[TuneReport, ...] = ()
    if cx.options.autotune:
        with trace.stage("tune"):
            s, tuned = tune(s, store_of(cx))
    symbols, kernels = launched(s)
    trace.text("schedule", lambda: show(s))
    with trace.stage("codegen"):
        code = assemble(kernels, cx)
    with trace.stage("plan"):
        donated = frozenset(p.name for p in program.placeholders if p.is_donated)
        plan = build_plan(s, symbols, cx, donated)
        user = {p.name: p.source for p in program.placeholders}
        is_pure = program.kind in ("backward", "body") and not program.mutated
        text = source(plan, user, g.env.hints, is_pure)
        call = _load(plan, text, code, program, cx)
    trace.text("module", lambda: code.text)
    trace.text("code", lambda: text)
    return Compiled(program, g, s, plan, text, code, call, tuned)


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


def named(s: Schedule) -> Schedule:
    """Number the kernels; equal ones on a device become one object, so that each is made once."""
    devices = _devices(s)
    unique: dict[tuple[str, str], Kernel] = {}
    steps: list[Any] = []
    for step in s.steps:
        if isinstance(step, Launch):
            key = devices[step], show(replace(step.kernel, name="k"))
            kernel = unique.get(key)
            if kernel is None:
                kernel = replace(step.kernel, name=f"{step.kernel.name}_{len(unique)}")
                unique[key] = kernel
            step = replace(step, kernel=kernel)
        steps.append(step)
    return replace(s, steps=tuple(steps))


def launched(s: Schedule) -> tuple[dict[Launch, str], dict[str, tuple[Kernel, str]]]:
    """The name of each launch's kernel, and the kernels by name with their devices."""
    devices = _devices(s)
    symbols = {step: step.kernel.name for step in devices}
    return symbols, {step.kernel.name: (step.kernel, device) for step, device in devices.items()}


def _devices(s: Schedule) -> dict[Launch, str]:
    """Where each launch runs: where its first argument is."""
    buffers = buffers_of(s.graph)
    steps = [step for step in s.steps if isinstance(step, Launch)]
    return {x: buffers[x.args[0]].type.device if x.args else "cpu" for x in steps}


def _env(program: FxProgram) -> SymEnv:
    env = SymEnv()
    for b in program.symbols.bindings:
        env = env.with_var(b.var, program.symbols.hints.get(b.var.name))
    return env


def _load(plan: Plan, text: str, code: Code, program: FxProgram, cx: Context) -> Boxed:
    """Execute the plan's module and put its kernels and constants into it."""
    module: dict[str, Any] = {"__name__": f"lenz.{plan.name}", "__file__": f"<{plan.name}>"}
    exec(compile(text, f"<lenz {plan.name}>", "exec"), module)  # text made just above, never cached
    module.update(code.functions)
    for c in plan.constants:
        module[c.name] = _constant(program, c.name)
    for o in plan.objects:
        module["obj_" + "".join(x if x.isalnum() else "_" for x in o)] = program.modules[o]
    if plan.aligned:
        module["unaligned"] = _Unaligned(program, cx)
    module["_library"] = code.library  # the code lives as long as the module
    call: Boxed = module["call"]
    return call


class _Unaligned:
    """The graph for tensors that start anywhere, compiled when the first such call comes."""

    __slots__ = ("_call", "_cx", "_program")

    def __init__(self, program: FxProgram, cx: Context) -> None:
        self._program = program
        self._cx = Context(replace(cx.options, aligned=False), cx.target)
        self._call: Boxed | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph on boxed arguments."""
        if self._call is None:
            self._call = compile_program(self._program, self._cx).call
        return self._call(args)


def _constant(program: FxProgram, name: str) -> torch.Tensor:
    for n in program.gm.graph.nodes:
        if n.op == "get_attr" and n.name == name:
            return _aligned(program.constants[str(n.target)])
    raise KeyError(name)


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """A constant as GPU kernels take it to be: at a multiple of 16 bytes, as new memory is."""
    if t.is_cpu or t.data_ptr() % 16 == 0:
        return t
    with torch.no_grad():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
