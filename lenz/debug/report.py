"""What was made of a program, as data: the result of `lenz.explain`.

Tests of generated code are written against these fields, never against text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lenz.ir.expr import loads_of, nodes_of
from lenz.ir.graph import Extern, outs_of
from lenz.ir.kernel import Kernel, Launch, Rejected, Schedule, Store, exprs_of, walk
from lenz.ir.plan import Alloc, CallStep, Free, LaunchStep, Plan, Reuse
from lenz.ir.tensor import TensorType
from lenz.sym import Sym, SymEnv


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One launch of a kernel. Names are those of the graph's arguments and buffers.

    bytes_read and bytes_written count each element of memory once, at the sizes of the example.
    ops counts the arithmetic operations of the body by name (each computed once per element).
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
    """A call of an eager op, and why it is one."""

    op: str
    reason: str
    outs: tuple[str, ...]

    @property
    def is_fallback(self) -> bool:
        """True when the op is called in eager because lenz cannot lower it (not by choice)."""
        return self.reason != "library"


@dataclass(frozen=True, slots=True)
class AllocReport:
    """Memory that the plan takes: new, or that of a dead buffer (`reused_from`)."""

    name: str
    nbytes: int
    dtype: str
    freed_at: int | None
    reused_from: str | None


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph. `ir` is the graph after all passes, `source` the plan as Python."""

    name: str
    kind: str
    kernels: tuple[KernelReport, ...]
    externs: tuple[ExternReport, ...]
    allocs: tuple[AllocReport, ...]
    rejected: tuple[Rejected, ...]
    timings: Mapping[str, float]
    ir: str = field(repr=False)
    source: str = field(repr=False)
    skips: tuple[str, ...] = ()

    @property
    def fallbacks(self) -> tuple[ExternReport, ...]:
        """Calls of eager ops that lenz cannot lower."""
        return tuple(e for e in self.externs if e.is_fallback)


@dataclass(frozen=True, slots=True)
class Report:
    """A whole call: its graphs in order of compilation, its launches in order of execution."""

    graphs: tuple[GraphReport, ...]
    launches: tuple[KernelReport | ExternReport, ...]
    result: object = field(repr=False)

    @property
    def allocs(self) -> tuple[AllocReport, ...]:
        """Allocations of all graphs."""
        return tuple(a for g in self.graphs for a in g.allocs)

    def __str__(self) -> str:
        lines: list[str] = []
        for g in self.graphs:
            lines.append(
                f"{g.name}: {len(g.kernels)} kernels, {len(g.externs)} library and eager calls,"
                f" {len(g.allocs)} allocations, {sum(g.timings.values()) * 1e3:.0f} ms to compile"
            )
            for k in g.kernels:
                moved = (k.bytes_read + k.bytes_written) / 1e6
                lines.append(f"  kernel {k.name} ({k.kind}): {moved:.3f} MB, from {_short(k.origins)}")
            for e in g.externs:
                lines.append(f"  call {e.op}: {e.reason}")
            for r in g.rejected:
                lines.append(f"  not fused: {r.first} with {r.second}: {r.why}")
        lines.append(f"{len(self.launches)} launches in this call")
        return "\n".join(lines)


def _short(origins: Sequence[str]) -> str:
    shown = ", ".join(origins[:6])
    return shown + (f" and {len(origins) - 6} more" if len(origins) > 6 else "")


def launch_report(step: Launch, names: Mapping[str, str], env: SymEnv) -> KernelReport:
    """Describe one launch; `names` maps buffers to the names users know them by."""
    k = step.kernel
    called = {p.name: names.get(a, a) for p, a in zip(k.params, step.args, strict=True)}
    reads = {e.attrs[0] for e in loads_of(*exprs_of(k.body))}
    writes = {s.buffer for s in walk(k.body) if isinstance(s, Store)}
    nbytes = {p.name: env.hint(p.size) * p.dtype.bytes for p in k.params}
    inout = [p.name for p in k.params if p.mode == "inout"]
    outs = [p.name for p in k.params if p.mode == "out" and step.args[_at(k, p.name)] in names]
    return KernelReport(
        name=k.name,
        kind=k.kind,
        loads=tuple(called[p.name] for p in k.params if p.name in reads),
        stores=tuple(called[p.name] for p in k.params if p.name in writes),
        mutated_args=tuple(called[n] for n in (*inout, *outs)),
        bytes_read=sum(nbytes[p.name] for p in k.params if p.name in reads),
        bytes_written=sum(nbytes[p.name] for p in k.params if p.name in writes),
        origins=k.origins,
        ops=_ops(k),
        text="",
    )


def _at(k: Kernel, param: str) -> int:
    return next(i for i, p in enumerate(k.params) if p.name == param)


def _ops(k: Kernel) -> dict[str, int]:
    counts: dict[str, int] = {}
    for e in nodes_of(*exprs_of(k.body)):
        if e.op.name not in ("load", "const", "ref", "index"):
            counts[e.op.name] = counts.get(e.op.name, 0) + 1
    return counts


def extern_report(step: Extern) -> ExternReport:
    """Describe one call of an eager op."""
    return ExternReport(step.op, step.reason, tuple(b.name for b in outs_of(step)))


def steps_report(
    s: Schedule, names: Mapping[str, str]
) -> tuple[KernelReport | ExternReport, ...]:
    """Describe all launches and calls of a schedule, in order."""
    made: list[KernelReport | ExternReport] = []
    for step in s.steps:
        if isinstance(step, Launch):
            made.append(launch_report(step, names, s.graph.env))
        elif isinstance(step, Extern):
            made.append(extern_report(step))
    return tuple(made)


def allocs_report(p: Plan, env: SymEnv) -> tuple[AllocReport, ...]:
    """Every allocation of a plan, with the step that frees it (None: it is returned)."""
    freed = {s.name: k for k, s in enumerate(p.steps) if isinstance(s, Free)}
    freed |= {s.source: k for k, s in enumerate(p.steps) if isinstance(s, Reuse)}
    made: list[AllocReport] = []
    for s in p.steps:
        if isinstance(s, (Alloc, Reuse)):
            source = s.source if isinstance(s, Reuse) else None
            size = nbytes(s.type, env)
            made.append(AllocReport(s.name, size, s.type.dtype.name, freed.get(s.name), source))
    return tuple(made)


def nbytes(kind: TensorType, env: SymEnv) -> int:
    """Bytes of memory of a tensor at the sizes of the example."""
    storage: Sym = kind.layout.storage
    return env.hint(storage) * kind.dtype.bytes


def launches_in(p: Plan) -> int:
    """Kernels and eager calls that one run of the plan makes."""
    return sum(isinstance(s, (LaunchStep, CallStep)) for s in p.steps)
