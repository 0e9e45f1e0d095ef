"""Choose the fastest kernel on its GPU for each launch with candidates.

All candidates of a graph are compiled in one batch. The choice is stored under the text of the cost
model's kernel, so that other processes measure nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial

import torch

from lenz import ops
from lenz.debug.report import Tried, TuneReport
from lenz.errors import InternalError
from lenz.ir.binary import Binary
from lenz.ir.dtype import I64
from lenz.ir.expr import Expr, index, interpret, rebuild
from lenz.ir.kernel import For, Kernel, Launch, Schedule, map_leaves, programs, walk
from lenz.ir.op import LOAD
from lenz.ir.syntax import map_values
from lenz.machine.cuda.triton.compile import KernelText, version
from lenz.machine.cuda.triton.kernel import emit
from lenz.machine.cuda.triton.pool import Failed, compile_all
from lenz.machine.cuda.tune.bench import SECONDS, Gpu, example_args, measure, restoring
from lenz.machine.cuda.widths import room_of
from lenz.records import dataclass, replace
from lenz.runtime.store import Store
from lenz.sym import Int, SymEnv

# The fastest kernel must take less than this fraction of the cost model's time; otherwise that
# kernel stays. Medians of the same kernel differ by a percent.
GAIN = 0.98


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates of one kernel, the cost model's first, all under its name.

    `env` has the example sizes for the measurements.
    """

    candidates: tuple[Kernel, ...]
    env: SymEnv

    def key(self, gpu: Gpu) -> str:
        """The key of the choice: the kernel, its sizes, the other candidates, the GPU."""
        usual = replace(self.candidates[0], name="k")
        sizes = [f"{v.name}={self.env.hint(v)}" for v in usual.sizes]
        lines = [version(), f"sm{gpu.arch} {gpu.name}", *sizes, *map(config, self.candidates)]
        lines.append(emit(usual, gpu.arch).line())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def widest(self) -> Kernel:
        """The cost model's kernel, with the largest workspace of any candidate."""
        usual = self.candidates[0]
        sizes = [[p.size for p in k.params] for k in self.candidates]
        most = [max(s, key=self.env.hint) for s in zip(*sizes, strict=True)]
        pairs = zip(usual.params, most, strict=True)
        return replace(usual, params=tuple(replace(p, size=s) for p, s in pairs))


def config(k: Kernel) -> str:
    """The tile of a GPU kernel in words: "p0 2 x r0 1024, 4 warps"."""
    lanes = [s.axis for s in walk(k.body) if isinstance(s, For) and s.kind == "lane"]
    tile = " x ".join(dict.fromkeys(f"{a.name} {a.extent.hi}" for a in lanes))
    stages = f", {k.tile.stages} stages" if k.tile.stages > 1 else ""
    return f"{tile or 'one element'}, {k.tile.warps} warps{stages}"


def tune(
    s: Schedule, store: Store | None, gpu_at: Callable[[int], Gpu] = Gpu
) -> tuple[Schedule, tuple[TuneReport, ...]]:
    """The schedule with a candidate chosen for each launch, and the measurements.

    Distinct kernels have distinct names. `gpu_at` returns the GPU with a number.
    """
    found: dict[int, dict[str, Choice]] = {}
    for step in s.steps:
        different = dict.fromkeys(step.candidates) if isinstance(step, Launch) else {}
        if isinstance(step, Launch) and len(different) > 1:
            number = torch.device(step.device).index or 0
            name = step.kernel.name
            choice = Choice(tuple(replace(k, name=name) for k in different), s.graph.env)
            found.setdefault(number, {}).setdefault(name, choice)
    reports: list[TuneReport] = []
    best: dict[str, Kernel] = {}
    for number, choices in found.items():
        made = _decide(list(choices.values()), gpu_at(number), store)
        for report, choice in zip(made, choices.values(), strict=True):
            best[report.kernel] = choice.candidates[report.chosen]
        reports += made
    steps = [
        replace(x, kernel=best.get(x.kernel.name, x.kernel), candidates=())
        if isinstance(x, Launch)
        else x
        for x in s.steps
    ]
    return replace(s, steps=tuple(steps)), tuple(reports)


def _decide(choices: Sequence[Choice], gpu: Gpu, store: Store | None) -> list[TuneReport]:
    """Choose for each kernel: from the store, or by measuring every candidate."""
    keys = [c.key(gpu) for c in choices]
    known = [_recall(store, key, c) for key, c in zip(keys, choices, strict=True)]
    missing = [c for c, report in zip(choices, known, strict=True) if report is None]
    binaries = iter(built([confined(k, c.env) for c in missing for k in c.candidates], gpu, store))
    reports: list[TuneReport] = []
    for key, c, report in zip(keys, choices, known, strict=True):
        if report is None:
            tried = race(c, [next(binaries) for _ in c.candidates], gpu)
            report = TuneReport(c.candidates[0].name, _fastest(tried), tried)
            if store is not None and any(t.us is not None for t in tried):
                content = {"chosen": report.chosen, "tried": [astuple(t) for t in tried]}
                store.put("tuned", key, json.dumps(content).encode())
        reports.append(report)
    return reports


def _recall(store: Store | None, key: str, c: Choice) -> TuneReport | None:
    data = None if store is None else store.get("tuned", key)
    if data is None:
        return None
    try:
        content = json.loads(data)
        tried = tuple(Tried(*t) for t in content["tried"])
        is_ours = [t.config for t in tried] == [config(k) for k in c.candidates]
        if not is_ours or content["chosen"] not in range(len(tried)):
            return None
        return TuneReport(c.candidates[0].name, content["chosen"], tried, True)
    except (ValueError, TypeError, KeyError):  # written by another version of lenz
        return None


def confined(k: Kernel, env: SymEnv) -> Kernel:
    """The kernel with a check of each position that it computes: arguments are random.

    Positions whose values are in range, such as clamped ones, have no check (`opt/in_range.py`).
    """

    def visit(e: Expr, args: list[Expr]) -> Expr:
        if e.op is LOAD and args:
            ends = {v.name: v for s in e.attrs[1] for v in s.free_vars}
            for n, a in enumerate(args):
                size = index(Int(room_of(ends[f"@{n}"], env)))
                args[n] = a if a.op.guarded else ops.assert_in_range(ops.cast(a, I64), size)
        return rebuild(e, tuple(args))

    inside = lambda s: map_values(s, lambda e: interpret(e, visit))
    return replace(k, body=map_leaves(k.body, inside))


def built(kernels: Sequence[Kernel], gpu: Gpu, store: Store | None) -> list[Binary | Failed]:
    """Compile kernels in one batch, without their checks: a failed one would stop the GPU.

    Nothing out of bounds is read or written even so, if they are `confined`.
    """
    texts: list[KernelText | Failed] = []
    for k in kernels:
        try:
            texts.append(replace(emit(k, gpu.arch), checks=False))
        except InternalError as e:
            texts.append(Failed(k.name, e.what))
    made = iter(compile_all([t for t in texts if isinstance(t, KernelText)], gpu.arch, store))
    return [t if isinstance(t, Failed) else next(made) for t in texts]


def race(
    c: Choice, binaries: Sequence[Binary | Failed], gpu: Gpu, seconds: float = SECONDS
) -> tuple[Tried, ...]:
    """Measure the candidates on the same arguments, each for up to `seconds`.

    A candidate that does not compile, or needs more than the GPU has, is dropped. Raises
    RuntimeError if the GPU is left unusable.
    """
    try:
        usual = confined(c.widest(), c.env)
        tensors = example_args(usual, c.env, gpu.place)
        restore = restoring(usual, tensors)
    except torch.OutOfMemoryError as e:
        return tuple(Tried(config(k), None, _line(e)) for k in c.candidates)
    values = [t.data_ptr() for t in tensors] + [c.env.hint(v) for v in usual.sizes]
    tried: list[Tried] = []
    for k, b in zip(c.candidates, binaries, strict=True):
        if isinstance(b, Failed):
            tried.append(Tried(config(k), None, b.message))
            continue
        grid = c.env.hint(programs(k))
        best = min((t.us for t in tried if t.us is not None), default=float("inf"))
        try:
            call = partial(gpu.load(b, len(k.params), len(k.sizes)), grid, *values)
            tried.append(Tried(config(k), measure(call, gpu, restore, seconds, best)))
        except RuntimeError as e:
            gpu.sync()  # raises if more than this launch failed
            tried.append(Tried(config(k), None, _line(e)))
    return tuple(tried)


def _line(e: Exception) -> str:
    return (str(e).splitlines() or [type(e).__name__])[0]


def _fastest(tried: Sequence[Tried]) -> int:
    """The index of the winner; the first wins unless another is clearly faster."""
    times = [t.us if t.us is not None else float("inf") for t in tried]
    best = min(times)
    return 0 if times[0] * GAIN <= best else times.index(best)
