"""How the GPU benchmarks measure: device events, a flushed cache, interleaved rounds, errors.

A kernel is timed with the L2 cache flushed before every call, and with the device kept busy for as
long as the host needs to launch the call, so that the figure is the time of the device alone; what
the host needs is a figure of its own.  A model is timed as its user sees it: the device waits for
the host where the host is slower.  On the CPU (to check the harness) both are wall times.
"""

from __future__ import annotations

import gc
import math
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.measure import LENZ_GRAPHS, LENZ_ON, PEER, PEER_GRAPHS, Call, Row, compiled, fresh
from lenz.api import compile_graph
from lenz.debug.trace import Recorder
from lenz.frontend import FxProgram
from lenz.ir.graph import Extern
from lenz.ir.kernel import Launch
from lenz.ir.plan import Boxed
from lenz.options import Options
from lenz.pipeline import Compiled

SIDES = ("eager", "lenz", PEER)
GRAPH_SIDES = ("eager", "lenz", LENZ_GRAPHS, LENZ_ON, PEER, PEER_GRAPHS)
FLUSH = 512 << 20  # bytes; ten times the largest L2 cache of today
CYCLES = 2.0e9  # of a GPU's clock per second, from above: a wait may be too long, not too short
BATCH = 0.02  # seconds of one sample of a model


class Clock(Protocol):
    """Times what a device does; `mark` may be asynchronous, `ms` may be called after `sync`."""

    def sync(self) -> None: ...
    def hide(self, seconds: float) -> None: ...
    def mark(self) -> Any: ...
    def ms(self, start: Any, end: Any) -> float: ...


class CudaClock:
    """Events on the current stream."""

    def __init__(self) -> None:
        self.scratch = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")

    def sync(self) -> None:
        torch.cuda.synchronize()

    def hide(self, seconds: float) -> None:
        """Evict everything from the L2 cache, and stay busy for at least `seconds`."""
        self.scratch.zero_()
        if seconds > 0:
            torch.cuda._sleep(int(seconds * CYCLES))  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))


class CpuClock:
    """The wall clock; nothing is asynchronous and nothing is flushed."""

    def sync(self) -> None: ...

    def hide(self, seconds: float) -> None: ...

    def mark(self) -> Any:
        return time.perf_counter()

    def ms(self, start: Any, end: Any) -> float:
        return float(end - start) * 1e3


def clock_for(device: str) -> Clock:
    """The clock of "cuda" or "cpu"."""
    return CudaClock() if device == "cuda" else CpuClock()


@dataclass(slots=True)
class Watch:
    """What lenz made of a function: kernels and eager calls of one call, and graphs it refused."""

    kernels: int = 0
    graphs: int = 0
    externs: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def compiled(self, made: Compiled, recorder: Recorder) -> Boxed:
        """Count the steps of a graph; the callable stays as it is."""
        self.graphs += 1
        for step in made.schedule.steps:
            if isinstance(step, Launch):
                self.kernels += 1
            elif isinstance(step, Extern):
                self.externs[step.op] = self.externs.get(step.op, 0) + 1
                if step.reason != "library":
                    self.fallbacks[step.op] = step.reason
        return made.call

    def refused_graph(self, why: str) -> None:
        """Note once that a graph runs in eager."""
        if why not in self.refused:
            self.refused.append(why)

    def row(self) -> Row:
        """The counts as part of a row."""
        made: Row = {"kernels": self.kernels, "externs": dict(sorted(self.externs.items()))}
        made |= {"graphs": self.graphs, "fallbacks": dict(sorted(self.fallbacks.items()))}
        return made | ({"refused": self.refused} if self.refused else {})


@dataclass(frozen=True, slots=True)
class _Watcher:
    """The protocol of lenz.api around a Watch."""

    watch: Watch

    def compiled(self, made: Compiled, recorder: Recorder) -> Boxed:
        return self.watch.compiled(made, recorder)

    def refused(self, program: FxProgram, why: str, run: Boxed) -> Boxed:
        self.watch.refused_graph(why)
        return run

    def untraced(self, name: str, kind: str, why: str) -> None:
        self.watch.refused_graph(why)


def side(fn: Any, name: str, watch: Watch, fullgraph: bool) -> Any:
    """Return `fn` through the side called `name`, sizes static; `watch` counts what lenz makes."""
    if name == "eager":
        return fn
    if name == PEER_GRAPHS:
        return torch.compile(fresh(fn), backend=PEER, dynamic=False, mode="reduce-overhead")
    if name == PEER:
        if fullgraph:
            return compiled(fn, name)
        return torch.compile(fresh(fn), backend=name, dynamic=False)
    graphs = {LENZ_GRAPHS: "auto", LENZ_ON: "on"}.get(name, "off")
    counts = watch if name == "lenz" else Watch()

    def lenz(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        options = Options.from_environment({"on_error": "raise", "cuda_graphs": graphs})
        return compile_graph(gm, inputs, options, _Watcher(counts))

    return torch.compile(fresh(fn), backend=lenz, dynamic=False, fullgraph=fullgraph)


def timed(calls: Mapping[str, Call], clock: Clock, seconds: float, most: int = 150) -> Row:
    """Time single calls in rounds for about `seconds`; the order rotates from round to round.

    Gives for every name the median milliseconds, their spread (half the distance of the quartiles
    over the median) and the host's microseconds, and the ratios of lenz to the others.
    """
    names = list(calls)
    host: dict[str, list[float]] = {n: [] for n in names}
    took: dict[str, list[float]] = {n: [] for n in names}
    for _ in range(3):
        for name in names:
            clock.sync()
            start = time.perf_counter()
            calls[name]()
            host[name].append(time.perf_counter() - start)
    clock.sync()
    busy = 1.5 * max(statistics.median(h) for h in host.values())
    _quiet()
    end = time.perf_counter() + seconds
    turn = 0
    while turn < 10 or (turn < most and time.perf_counter() < end):
        shift = turn % len(names)
        marks = {}
        for name in names[shift:] + names[:shift]:
            clock.hide(busy)
            start = time.perf_counter()
            first = clock.mark()
            calls[name]()
            marks[name] = (first, clock.mark())
            host[name].append(time.perf_counter() - start)
        clock.sync()
        for name, (first, last) in marks.items():
            took[name].append(clock.ms(first, last))
        turn += 1
    gc.enable()
    made = summary(took)
    return made | {f"{n}_host_us": statistics.median(h) * 1e6 for n, h in host.items()}


def steady(calls: Mapping[str, Call], clock: Clock, seconds: float) -> Row:
    """Time batches of calls in rounds for about `seconds`; what the host needs counts."""
    names = list(calls)
    took: dict[str, list[float]] = {n: [] for n in names}
    inner: dict[str, int] = {}
    for name in names:
        batch(calls[name], clock, 2)
        inner[name] = max(1, math.ceil(BATCH * 1e3 / max(1e-3, batch(calls[name], clock, 2))))
    _quiet()
    end = time.perf_counter() + seconds
    turn = 0
    while turn < 5 or (turn < 100 and time.perf_counter() < end):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            took[name].append(batch(calls[name], clock, inner[name]))
        turn += 1
    gc.enable()
    return summary(took)


def batch(call: Call, clock: Clock, count: int) -> float:
    """Milliseconds per call of `count` calls in a row."""
    clock.sync()
    first = clock.mark()
    for _ in range(count):
        call()
    last = clock.mark()
    clock.sync()
    return clock.ms(first, last) / count


def _quiet() -> None:
    gc.collect()
    gc.disable()


def summary(took: Mapping[str, Sequence[float]]) -> Row:
    """Medians and spreads of milliseconds, and medians of each round's ratios."""
    made: Row = {"rounds": len(next(iter(took.values())))}
    for name, t in took.items():
        low, middle, high = statistics.quantiles(t, n=4)
        made[f"{name}_ms"] = middle
        made[f"{name}_spread"] = (high - low) / 2 / middle if middle else 0.0
    for base in took:
        if base != "lenz" and "lenz" in took:
            pairs = zip(took["lenz"], took[base], strict=True)
            made[f"lenz/{base}"] = statistics.median(a / b for a, b in pairs if b)
    for base in ({"lenz", PEER_GRAPHS} & {*took}) if LENZ_GRAPHS in took else ():
        pairs = zip(took[LENZ_GRAPHS], took[base], strict=True)
        made[f"{LENZ_GRAPHS}/{base}"] = statistics.median(a / b for a, b in pairs if b)
    return made


def host_and_busy(call: Call, clock: Clock, count: int = 5) -> tuple[float, float]:
    """Milliseconds of a call until its last launch is queued, and in which a kernel runs.

    Each call begins on an idle device; without a GPU the second figure is 0.
    """
    took = []
    for _ in range(4 * count):
        clock.sync()
        start = time.perf_counter()
        call()
        took.append((time.perf_counter() - start) * 1e3)
    clock.sync()
    host = statistics.median(took)
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    if not torch.cuda.is_available():
        return host, 0.0
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(count):
            call()
        clock.sync()
    return host, sum(e.device_time_total for e in profile.key_averages()) / 1e3 / count


def error(got: Any, want: Any) -> float:
    """The largest error of all results, each relative to the largest magnitude expected of it.

    Whole numbers count as the share of elements that differ; a NaN or infinity where none is
    expected is an infinite error.  Raises AssertionError where the shapes differ.
    """
    have, wanted = tree_leaves(got), tree_leaves(want)
    assert len(have) == len(wanted), f"{len(have)} results, expected {len(wanted)}"
    return max((_error(g, w) for g, w in zip(have, wanted, strict=True)), default=0.0)


def _error(g: Any, w: Any) -> float:
    if not isinstance(w, Tensor):
        return 0.0 if g == w else math.inf
    assert g.shape == w.shape, f"a result of shape {tuple(g.shape)}, expected {tuple(w.shape)}"
    if not w.numel():
        return 0.0
    if not w.dtype.is_floating_point:
        return float((g != w).double().mean())
    g64, w64 = _float64(g), _float64(w)
    scale = float(w64.nan_to_num(0.0, 0.0, 0.0).abs().max()) or 1.0
    same = (g64 == w64) | (g64.isnan() & w64.isnan())
    off = (g64 - w64).abs().nan_to_num(math.inf, math.inf)
    return float(torch.where(same, 0.0, off).max()) / scale


def distance(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """‖got - want‖ / ‖want‖ over all elements of all tensors; NaN never passes as a number."""
    off = sum(float((_float64(g) - _float64(w)).square().sum()) for g, w in _pairs(got, want))
    size = sum(float(_float64(w).square().sum()) for w in want)
    return math.sqrt(off / size) if size else math.sqrt(off)


def _pairs(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(got, want, strict=True))


def _float64(t: Tensor) -> Tensor:
    t = t.detach()
    return (t.float() if t.element_size() == 1 else t).double()


def exact(value: Any) -> Any:
    """The same structure with float64 copies of its floating tensors; gradients are asked alike."""

    def one(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t.detach().clone()
        return _float64(t).requires_grad_(t.requires_grad)

    return tree_map_only(Tensor, one, value)


def cloned(value: Any) -> Any:
    """The same structure with clones of its tensors, in the same layout."""
    one: Callable[[Tensor], Tensor] = lambda t: t.detach().clone().requires_grad_(t.requires_grad)
    return tree_map_only(Tensor, one, value)


def copy_call(nbytes: int, device: str) -> Call:
    """A copy that moves as many bytes (read and written together): the limit of a kernel's time."""
    source = torch.empty(max(1, nbytes // 4), dtype=torch.float16, device=device).normal_()
    into = torch.empty_like(source)
    return lambda: into.copy_(source)


def copy_rates(device: str, largest: int) -> Row:
    """Copy bandwidth in GB/s, bytes read and written, for buffers of 16 MiB up to `largest`."""
    clock, made = clock_for(device), {}
    size = min(16 << 20, largest)
    while size <= largest:
        ms = timed({"copy": copy_call(2 * size, device)}, clock, 0.2, most=30)["copy_ms"]
        made[f"{size >> 20} MiB" if size >> 20 else f"{size} B"] = round(2 * size / ms / 1e6, 1)
        size *= 4
    if device == "cuda":
        torch.cuda.empty_cache()
    return made


def peak(call: Call, clock: Clock, below: int) -> int:
    """Most bytes of device memory in use during one call, above the level `below`.

    Frames that Dynamo's graph breaks leave in cycles, with all their tensors, are collected first:
    Python does it some time later.
    """
    gc.collect()
    clock.sync()
    torch.cuda.reset_peak_memory_stats()
    call()
    clock.sync()
    return torch.cuda.max_memory_allocated() - below


def level() -> int:
    """Bytes of device memory in use; 0 without a GPU."""
    gc.collect()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def gpu_machine(device: str) -> Row:
    """Name the machine: the GPU, its driver, and the versions of what runs on it."""
    made: Row = {"gpu": torch.cuda.get_device_name() if device == "cuda" else "none (CPU)"}
    if device == "cuda":
        made["multiprocessors"] = torch.cuda.get_device_properties(0).multi_processor_count
        made["driver"] = _driver()
        made["cuda"] = torch.version.cuda
    made["python"], made["torch"] = platform.python_version(), torch.__version__
    for package in ("triton", "llvmlite", "transformers"):
        try:
            made[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            made[package] = None
    return made


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    ask = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n")[0].strip() or "unknown"
