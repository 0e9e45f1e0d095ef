"""One probe of `python -m lenz bisect`: a program in a process of its own, partly compiled by lenz.

A graph here is one program of `compile_fx`: a half of a training step, or the body of a loop. The
probe compiles some graphs in full, stops at a stage of one, and runs the others in eager.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch.fx import GraphModule

from lenz.commands.compare import distance, exact, fresh, tensors_of
from lenz.commands.kernel import call_kernel
from lenz.context import Context
from lenz.debug.blame import blame, last_line
from lenz.debug.names import shown, titled
from lenz.debug.oracle import copies
from lenz.errors import InternalError, Missing, Unsupported
from lenz.frontend import FxProgram
from lenz.frontend.capture import capture
from lenz.frontend.session import numbered
from lenz.ir.graph import Graph, origin_of
from lenz.ir.interp import interp, interp_schedule
from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import Kernel, Launch
from lenz.ir.plan import Boxed
from lenz.ir.printer import show, show_node
from lenz.keys import native_names
from lenz.lower import lower
from lenz.machines import assemble
from lenz.opt import PASSES
from lenz.options import Options
from lenz.pipeline import compile_program, kernels_of, named
from lenz.process import ask
from lenz.recall import context
from lenz.records import dataclass, field, replace
from lenz.schedule import schedule

STAGES = ("lower", *PASSES)
ALL = 1 << 30
TWICE, ULPS = 2, 4  # a result is right if it is as near to float64: eager may be exact by luck
WHOLE = -1  # in place of a number of launches


@dataclass(frozen=True, slots=True)
class Probe:
    """A program, as `python FILE ARGUMENTS`, and what lenz compiles of it.

    options   those of the environment, which may not be that of the probe's process
    way       eager, float64 or lenz
    last      so many graphs are compiled, in their order; later ones run in eager
    stage     the last pass of graph `last - 1`, whose result the interpreter runs; "" for all
    fuel      the optional rewrites of that graph
    given     so many of its launches are interpreted, others compiled; without a plan
    """

    file: str
    function: str = "main"
    arguments: tuple[str, ...] = ()
    options: Options = field(default_factory=Options.from_environment)
    way: str = "lenz"
    last: int = ALL
    stage: str = ""
    fuel: int = ALL
    given: int = WHOLE


@dataclass(slots=True)
class Outcome:
    """What a probe saw, as plain data.

    kind, what  "" if it is right, else "wrong", "raises", "dies", or "unknown" (an error of the
                interpreter itself), and the error
    results     the tensors that the function returned, as arrays in double precision
    steps       the relative distances of neighbours in their dtypes
    graphs      the names of the graphs
    lines       IR and the user's line: of each node of the last graph after its last stage, of each
                kernel, or of an error
    used, rewrite  the number of the last graph's optional rewrites, and the last of them
    error       the distance from float64, if there is one
    """

    kind: str = ""
    what: str = ""
    results: list[Any] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    used: int = 0
    rewrite: str = ""
    error: float = 0.0

    def keep(self, out: Any) -> None:
        """Keep the tensors of a result."""
        tensors = tensors_of(out)
        self.steps = [torch.finfo(t.dtype).eps for t in tensors if t.dtype.is_floating_point]
        wide = [torch.complex128 if t.is_complex() else torch.float64 for t in tensors]
        self.results = [t.to(w).numpy() for t, w in zip(tensors, wide, strict=True)]

    def fail(self, e: Exception, kind: str = "raises") -> None:
        """Note the first error."""
        if not self.kind:
            text = " ".join(f"{type(e).__name__}: {e}".split("\n")[:3])
            self.kind, self.what, self.lines = kind, shown(text)[:400], [blame(e)]


def observe(p: Probe) -> Outcome:
    """Run a probe."""
    sys.argv, bench = [p.file, *p.arguments], Bench(p)
    seen = bench.seen
    if p.way == "float64":
        row = exact(p.file, p.function)
        seen.keep(row.results)
        seen.what = row.failed
        return seen
    try:
        fn, is_eager = fresh(p.file, p.function), p.way == "eager"
        with torch.compiler.set_stance("force_eager" if is_eager else "default"):
            seen.keep(fn() if is_eager else torch.compile(fn, backend=bench.backend)())
    except Exception as e:  # noqa: BLE001  # of the program or of lenz: the caller knows
        seen.fail(e)
    seen.used, seen.rewrite = bench.fuel.used, bench.fuel.last
    return seen


class Bench:
    """Compiles the graphs of one probe, each as far as it says."""

    def __init__(self, p: Probe) -> None:
        self.p, self.seen = p, Outcome()
        self.options = replace(p.options, cache=False, on_error="raise")
        self.fuel = context(self.options).fuel

    def backend(self, gm: GraphModule, inputs: Sequence[Any]) -> Any:
        """The backend for torch.compile."""
        fail, names = lambda e, kind: self.seen.fail(e), native_names(None)
        return capture(gm, inputs, self.compiled, self.options, names, numbered(), failed=fail)

    def compiled(self, program: FxProgram) -> Boxed:
        """The callable of a graph."""
        k, p, cx = len(self.seen.graphs), self.p, context(self.options)
        self.seen.graphs.append(titled(program.name))
        if k >= p.last:
            return program.eager()
        if k == p.last - 1:
            cx = replace(cx, options=replace(self.options, fuel=p.fuel), fuel=self.fuel)
        try:
            if k == p.last - 1 and (p.stage or p.given != WHOLE):
                return self.staged(program, cx)
            made = compile_program(program, cx)
            run: Any = made.call
            run.strides = made.strides
            return run  # type: ignore[no-any-return]  # an Any, because it has an attribute
        except (Unsupported, Missing):
            return program.eager()
        except Exception as e:
            self.seen.fail(e)
            raise

    def staged(self, program: FxProgram, cx: Context) -> Boxed:
        """A graph after the probe's stage, or its launches one by one."""
        p, g = self.p, lower(program, cx, frozenset())
        for name in STAGES[1 : STAGES.index(p.stage) + 1 if p.stage else None]:
            g = PASSES[name](g, cx)
        if p.given == WHOLE:
            told = [(show_node(n), last_line(origin_of(n))) for n in g.nodes]
            self.seen.lines = [(" ".join(text.split()), where) for text, where in told]
            return self.interpreted(program, g, interp, g)
        s = named(schedule(g, cx))
        steps = [x for x in s.steps if isinstance(x, Launch)]
        self.seen.lines = [(show(x.kernel), last_line(x.origins)) for x in steps]
        wanted, done = {x.kernel.name for x in steps[p.given :]}, count()
        kernels = {name: k for name, k in kernels_of(s).items() if name in wanted}
        code = assemble(kernels, cx)()

        def run(k: Kernel, memory: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
            if next(done) < p.given:
                interp_kernel(k, memory, sizes)
                return
            device = kernels[k.name][1]
            own = [t.to(device) for t in memory.values()]
            call_kernel(code.functions[k.name], k, own, sizes, device)
            for t, made in zip(memory.values(), own, strict=True):
                t.copy_(made)

        return self.interpreted(program, g, partial(interp_schedule, run_kernel=run), s)

    def interpreted(self, program: FxProgram, g: Graph, run: Callable[..., Any], x: Any) -> Boxed:
        """`x` run by an interpreter. An InternalError is the graph's fault, others are its own."""
        names = {n.name: str(n.target) for n in program.gm.graph.find_nodes(op="get_attr")}
        constants = [program.constants[names[b.name]].cpu() for b in g.constants]

        def call(args: list[Any]) -> Sequence[Any]:
            given = list(args)
            args.clear()
            try:
                made = run(x, copies(given, "cpu"), constants, objects=program.modules)
            except Exception as e:
                self.seen.fail(e, "raises" if isinstance(e, InternalError) else "unknown")
                raise
            for k in program.mutated:
                given[k].copy_(made.inputs[k])
            devices = [getattr(o.value, "device", None) for o in program.outputs]
            pairs = zip(made.outputs, devices, strict=True)
            return tuple(y.to(d) if isinstance(y, torch.Tensor) and d else y for y, d in pairs)

        return call


class Judged:
    """A program under lenz, with its results in eager and in float64."""

    def __init__(self, program: Probe, seconds: float) -> None:
        self.program = program
        self.ask = cache(partial(ask, observe, seconds=seconds))  # no probe runs twice

    def begin(self) -> str:
        """Run the program in eager and in float64; the error if eager fails."""
        ways = [replace(self.program, way=way) for way in ("eager", "float64")]
        (eager, why), (exact, self.why) = map(self.ask, ways)
        self.why = self.why if exact is None else exact.what
        if eager is not None and not self.why:
            self.want = [torch.from_numpy(x) for x in exact.results]
            self.near = self.error(eager)
            self.most = max(TWICE * self.near, ULPS * max(eager.steps, default=0.0))
        return str(why) if eager is None else eager.what

    def error(self, seen: Outcome) -> float:
        """The distance of the results from float64."""
        return distance([torch.from_numpy(x) for x in seen.results], self.want)

    def run(self, **how: Any) -> Outcome:
        """Run the program with other fields of the probe, and judge it."""
        found, why = self.ask(replace(self.program, **how))
        seen = Outcome("dies", why) if found is None else found
        if not seen.kind and not self.why:
            seen.error = self.error(seen)
            seen.what = f"error {seen.error:.1e}, eager's {self.near:.1e}"
            seen.kind = "wrong" if seen.error > self.most else ""
        return seen
