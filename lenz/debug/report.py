"""The compilation of a graph, as data: what `lenz.explain` tells of each.

Tests of generated code use these fields, never text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lenz.debug.names import titled
from lenz.debug.traffic import touched
from lenz.errors import some
from lenz.ir.alive import aliased, bytes_alive
from lenz.ir.expr import nodes_of
from lenz.ir.graph import Extern, Graph, Named, buffers_of, outs_of, reads_of, roots_of
from lenz.ir.kernel import Kernel, Launch, Rejected, Schedule, exprs_of
from lenz.ir.plan import Alloc, CallStep, Free, LaunchStep, Plan, Reuse
from lenz.ir.printer import show
from lenz.records import dataclass, field
from lenz.sym import SymEnv


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One launch of a kernel. Arguments have the user's names.

    kind           "pointwise", "reduction", "split_scan" and so on: ir.kernel.KernelKind
    loads, stores  buffers it reads and writes; mutated_args are the arguments and the workspace
                   among the stores
    bytes_read, bytes_written  count each element of memory once, at the example sizes
    origins        FX nodes it computes, each followed by the user's file:line where it changes
    ops            distinct operations of the body by name; each runs once per element
    text           the kernel as IR
    """

    name: str
    kind: str
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    mutated_args: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    origins: tuple[str, ...]
    ops: Mapping[str, int]
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ExternReport:
    """A call of an eager op, with its reason, its FX node and the user's line."""

    op: str
    reason: str
    outs: tuple[str, ...]
    mutated_args: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    @property
    def is_fallback(self) -> bool:
        """True if the op runs in eager because lenz cannot lower it (not by choice)."""
        return self.reason != "library"


@dataclass(frozen=True, slots=True)
class AllocReport:
    """Memory that the plan allocates, or reuses from a dead buffer (`reused_from`)."""

    name: str
    nbytes: int
    dtype: str
    freed_at: int | None
    reused_from: str | None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The bytes that a graph holds, without its arguments, while it launches or calls `what`."""

    what: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Tried:
    """One configuration of a kernel: microseconds per launch, or None and the reason."""

    config: str
    us: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The measurements of a kernel; `chosen` is an index into `tried`, the default's is 0.

    `remembered` says that an earlier process did the measurements.
    """

    kernel: str
    chosen: int
    tried: tuple[Tried, ...]
    remembered: bool = False

    def __str__(self) -> str:
        best = self.tried[self.chosen]
        if best.us is None:
            return f"{self.kernel}: none of {len(self.tried)} tiles was measured: {best.why}"
        usual = self.tried[0].us
        than = f", {usual:.1f} us with {self.tried[0].config}" if usual and self.chosen else ""
        return f"{self.kernel}: {best.us:.1f} us with {best.config}{than}"


@dataclass(frozen=True, slots=True, repr=False)
class GraphReport:
    """One graph: its launches, memory and decisions.

    kind        "inference", "forward", "backward", the "body" of a branch or loop, or "capture":
                the graph could not be captured, so that no op of it is known
    timings     seconds of each stage itself; "trace" is torch's part
    ir, source  the graph after all passes, and the plan as Python
    skips       why the graph, or a part of it, runs in eager; else empty
    guards      the number of conditions that Dynamo checks before a call
    ended_by    reason and line of the graph break after it, if there is one
    facts       assumptions about sizes beyond those guards, until a call breaks one
    autotune    measurements that chose the tiles of GPU kernels, with option `autotune`
    timeline    bytes alive at each launch and call of the plan, at the example sizes
    cuda_graph  whether a CUDA graph replays it, or why not; empty without option `cuda_graphs`
    calls       the number of calls of each op, before anything is fused or dropped
    """

    name: str
    kind: str
    kernels: tuple[KernelReport, ...] = ()
    externs: tuple[ExternReport, ...] = ()
    allocs: tuple[AllocReport, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    ir: str = field(default="", repr=False)
    source: str = field(default="", repr=False)
    skips: tuple[str, ...] = ()
    cuda_graph: str = ""
    autotune: tuple[TuneReport, ...] = ()
    guards: int = 0
    ended_by: str = ""
    facts: tuple[str, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)
    timeline: tuple[MemoryReport, ...] = field(default=(), repr=False)

    @property
    def peak(self) -> int:
        """The most bytes alive at once, without arguments and memory of libraries."""
        return max((m.nbytes for m in self.timeline), default=0)

    @property
    def fallbacks(self) -> tuple[ExternReport, ...]:
        """Calls of eager ops because lenz cannot lower them."""
        return tuple(e for e in self.externs if e.is_fallback)

    def __repr__(self) -> str:
        made = some(self.kernels, "kernel"), some(self.externs, "library or eager call")
        took = f"{sum(self.timings.values()) * 1e3:.0f} ms to compile"
        counts = ", ".join((*made, some(self.allocs, "allocation"), took))
        calls = [f"call {e.op}: {e.reason}{_at(e.origins)}" for e in self.externs]
        lines = [f"{titled(self.name)}: {counts}", *_counted([*map(_line, self.kernels)])]
        lines += [f"runs in eager: {why}" for why in self.skips]
        lines += _counted([] if self.skips else calls) + self._memory()
        lines += _counted([f"not fused, because {r.why}" for r in self.rejected])
        lines += [f"tuned {t}" for t in self.autotune]
        lines += [f"assumes {', '.join(self.facts)}"] * bool(self.facts)
        lines += [f"CUDA graph: {self.cuda_graph}"] * bool(self.cuda_graph)
        lines += [f"graph break: {self.ended_by}"] * bool(self.ended_by)
        return "\n  ".join(lines)

    def _memory(self) -> list[str]:
        if not self.peak:
            return []
        at, most = max(enumerate(self.timeline), key=lambda m: m[1].nbytes)
        where = f"step {at + 1} of {len(self.timeline)}, {most.what}"
        return [f"memory: at most {self.peak / 1e6:.3f} MB beside the arguments, at {where}"]


def fusions(s: Schedule, tuned: Sequence[TuneReport] = ()) -> str:
    """What launches and calls compute, and about how long; what was not fused, and why; tuning.

    The time is that of moving their bytes at the measured bandwidth of the device.
    """
    types = {name: b.type for name, b in buffers_of(s.graph).items()}
    env, lines = s.graph.env, list[str]()
    for x in s.steps:
        if isinstance(x, Launch):
            k = kernel_report(x, {}, env)
            lines.append(_line(k) + _estimate(k.bytes_read + k.bytes_written, x.device))
        elif isinstance(x, Extern):
            names = dict.fromkeys([*reads_of(x), *(b.name for b in outs_of(x))])
            moved = sum(env.hint(types[n].nbytes) for n in names if n in types)
            at = next((types[n].device for n in names if n in types), "cpu")
            lines.append(f"call {op_called(x)}: {x.reason}{_at(x.origin)}{_estimate(moved, at)}")
    lines += [f"{r.first} and {r.second} are not fused: {r.why}" for r in s.rejected]
    return "\n".join([*lines, *(f"tuned {t}" for t in tuned)])


def _estimate(moved: int, device: str) -> str:
    from lenz.debug.profile import bandwidth

    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        return ""  # compiled for a device that is not here
    return f", about {moved / bandwidth(device) / 1e3:.2f} us by its bytes"


def _line(k: KernelReport) -> str:
    done = work_of(k.bytes_read, k.bytes_written, [o for o in k.origins if ":" not in o])
    return f"kernel {k.name} ({k.kind}): {done}{_at(k.origins)}"


def work_of(read: int, written: int, nodes: Sequence[str]) -> str:
    """The bytes that a kernel moves, and the nodes that it computes."""
    more = f" and {len(nodes) - 6} more" if len(nodes) > 6 else ""
    moved = f"{read / 1e6:.3f} MB in, {written / 1e6:.3f} MB out"
    return f"{moved}, from {', '.join(nodes[:6])}{more}"


def _at(origins: Sequence[str]) -> str:
    """The line of the last node, which comes after the nodes that it absorbed."""
    return next((f" at {o}" for o in reversed(origins) if ":" in o), "")


def _counted(lines: Sequence[str]) -> list[str]:
    """Each distinct line, with its number of occurrences."""
    return [f"{line} ({n} times)" if n > 1 else line for line, n in Counter(lines).items()]


def kernel_report(step: Launch, names: Mapping[str, str], env: SymEnv) -> KernelReport:
    """Describe one launch; `names` maps each argument of the graph to the user's name."""
    k = step.kernel
    pairs = list(zip(k.params, step.args, strict=True))
    called = {p.name: names.get(a, a) for p, a in pairs}
    is_argument = {p.name: a in names or p.mode == "work" for p, a in pairs}
    read, written = touched(k, env)
    return KernelReport(
        name=k.name,
        kind=k.kind,
        loads=tuple(called[n] for n in read),
        stores=tuple(called[n] for n in written),
        mutated_args=tuple(called[n] for n in written if is_argument[n]),
        bytes_read=sum(read.values()),
        bytes_written=sum(written.values()),
        origins=step.origins,
        ops=_ops(k),
        text=show(k),
    )


def _ops(k: Kernel) -> dict[str, int]:
    names = (e.op.name for e in nodes_of(*exprs_of(k.body)))
    return dict(Counter(name for name in names if name not in ("load", "const", "ref", "index")))


def extern_report(step: Extern, names: Mapping[str, str]) -> ExternReport:
    """Describe one call of an eager op."""
    outs = tuple(b.name for b in outs_of(step))
    mutated = tuple(names[m] for m in step.mutates if m in names)
    return ExternReport(op_called(step), step.reason, outs, mutated, step.origin)


def op_called(step: Extern) -> str:
    """The op that a call is of: of a higher-order op for one op, such as a custom one, that op."""
    first = next(iter(step.args), None)
    return first.value if isinstance(first, Named) and first.kind == "op" else step.op


def launches_report(
    s: Schedule, names: Mapping[str, str]
) -> tuple[KernelReport | ExternReport, ...]:
    """Describe all launches and calls of a schedule, in order."""
    names = {**{v: names[r] for v, r in roots_of(s.steps).items() if r in names}, **names}
    made: list[KernelReport | ExternReport] = []
    for step in s.steps:
        if isinstance(step, Launch):
            made.append(kernel_report(step, names, s.graph.env))
        elif isinstance(step, Extern):
            made.append(extern_report(step, names))
    return tuple(made)


def allocs_report(p: Plan, env: SymEnv) -> tuple[AllocReport, ...]:
    """Every allocation of a plan, with the step that frees it (None if it is returned)."""
    freed = {s.name: k for k, s in enumerate(p.flat) if isinstance(s, Free)}
    freed |= {s.source: k for k, s in enumerate(p.flat) if isinstance(s, Reuse)}
    made: list[AllocReport] = []
    for s in p.flat:
        if isinstance(s, (Alloc, Reuse)):
            source = s.source if isinstance(s, Reuse) else None
            size = env.hint(s.type.nbytes)
            made.append(AllocReport(s.name, size, s.type.dtype.name, freed.get(s.name), source))
    return tuple(made)


def timeline(p: Plan, s: Schedule, env: SymEnv) -> tuple[MemoryReport, ...]:
    """Return the bytes alive at each launch and call of a plan, at the sizes of the example.

    Arguments, constants and memory that libraries allocate for themselves do not count. A result of
    a call counts as its own memory unless it aliases an argument.
    """
    made = [b for n in s.steps if isinstance(n, Extern) for b in outs_of(n)]
    sizes = {b.name: env.hint(b.type.nbytes) for b in made}
    sizes |= {x.name: env.hint(x.type.nbytes) for x in p.flat if isinstance(x, Alloc)}
    return tuple(
        MemoryReport(x.op if isinstance(x, CallStep) else x.kernel, level)
        for x, level in zip(p.flat, bytes_alive(p.flat, sizes, aliased(s), {}), strict=True)
        if isinstance(x, CallStep | LaunchStep)
    )


def graph_report(
    program: Any, g: Graph, s: Schedule, p: Plan, steps: Sequence[KernelReport | ExternReport]
) -> GraphReport:
    """Describe a graph of a `frontend.FxProgram` by what became of it; `steps` are its launches."""
    return _about(
        program,
        kernels=tuple(x for x in steps if isinstance(x, KernelReport)),
        externs=tuple(x for x in steps if isinstance(x, ExternReport)),
        allocs=allocs_report(p, g.env),
        rejected=s.rejected,
        ir=show(g, origins=True),
        facts=tuple(text for name, f in program.facts.items() for text in f.told(name)),
        timeline=timeline(p, s, g.env),
    )


def refused_report(program: Any, why: str) -> GraphReport:
    """Describe a `frontend.FxProgram` that runs in eager, by its calls with the user's lines."""
    named = [(str(n.target), n.name, program.origin(n)) for n in program.nodes]
    short = why.partition("\n")[0].rstrip(":")  # `skips` has all of it
    externs = tuple(ExternReport(op, short, (n,), (), (n, line)) for op, n, line in named)
    return _about(program, externs=externs, skips=(why,))


def _about(program: Any, **more: Any) -> GraphReport:
    """A report with what a program itself tells."""
    own = ("name", "kind", "guards", "ended_by", "calls")
    return GraphReport(**{name: getattr(program, name) for name in own}, **more)
