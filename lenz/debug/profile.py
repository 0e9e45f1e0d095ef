"""Times of a run per kernel and call, on the host and on the device.

The result of `lenz.profile`, and of the option `profile`.
"""

from __future__ import annotations

import atexit
import json
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lenz.debug.between import title_of
from lenz.debug.names import titled
from lenz.debug.traffic import bytes_moved
from lenz.debug.watch import Tensors, Watch, Watched
from lenz.ir.graph import Named
from lenz.ir.plan import LaunchStep
from lenz.records import dataclass, field, replace

STREAM = 1 << 26  # bytes copied to measure the bandwidth: more than caches hold
ROUNDS = 5
# A GPU is kept busy while a step is launched, so that events around the step time its work and not
# its launch: for twice the time of the last launch, at first this one, and that of two events.
LAUNCH_US = 50.0
EVENTS_US = 50.0
CYCLES_PER_US = 2000  # of a GPU's clock; a slower one is busy for longer


@dataclass(slots=True)
class Ran:
    """One launch or call. Times are microseconds; `start` is the host's, of the whole process.

    gap     from the end of the previous step to the start of this one, on its device
    host    until the launch or call returned
    device  its work; on CPUs the same as `host`
    """

    graph: str
    name: str
    line: str
    place: str
    start: float
    gap: float
    host: float
    device: float
    nbytes: int
    is_kernel: bool


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """A kernel or library call of one graph: medians per launch, in microseconds.

    share  fraction of the bandwidth of a copy on this device; above 1 if caches help
    """

    graph: str
    name: str
    line: str
    launches: int
    host_us: float
    device_us: float
    gap_us: float
    nbytes: int
    gbps: float
    share: float
    is_kernel: bool

    def __str__(self) -> str:
        ms, gb = self.device_us / 1e3, self.nbytes / 1e9
        speed = f"{ms:10.4f} {gb:10.6f} {self.gbps:9.2f} {self.share:7.1%}"
        at = f"  {self.line}" if self.line else ""
        return f"{speed} {self.host_us:10.1f} {self.gap_us:9.1f} {self.launches:8}  {self.name}{at}"


HEAD = "{:>10} {:>10} {:>9} {:>7} {:>10} {:>9} {:>8}  {}".format(
    "ms", "GB", "GB/s", "limit", "launch us", "gap us", "launches", "name"
)


@dataclass(slots=True, repr=False)
class Profile:
    """The launches and calls of compiled graphs, and the calls of these graphs.

    `print(profile)` gives a table; `save` writes it, or a trace for Chrome and Perfetto.
    """

    has_gaps: bool = False  # whether GB/s count the time before each launch
    ran: list[Ran] = field(default_factory=list)
    calls: list[tuple[str, float, float]] = field(default_factory=list)  # name, start, us

    def watch(self, graph: Watched) -> Watch:
        """A watch that adds the calls of a graph."""
        return Timer(graph, self)

    def clear(self) -> None:
        """Drop all measurements so far."""
        self.ran.clear()
        self.calls.clear()

    @property
    def rows(self) -> tuple[ProfileRow, ...]:
        """Kernels and calls, longest total time first."""
        groups: dict[tuple[str, str, str], list[Ran]] = {}
        for r in self.ran:
            groups.setdefault((r.graph, r.name, r.line), []).append(r)
        order = sorted(groups.values(), key=lambda rs: -sum(r.device for r in rs))
        return tuple(map(self._row, order))

    def _row(self, ran: Sequence[Ran]) -> ProfileRow:
        first = ran[0]
        took = median(r.device + r.gap * self.has_gaps for r in ran)
        nbytes = int(median(r.nbytes for r in ran))
        gbps = nbytes / took / 1e3 if took else 0.0
        return ProfileRow(
            graph=first.graph,
            name=first.name,
            line=first.line,
            launches=len(ran),
            host_us=median(r.host for r in ran),
            device_us=median(r.device for r in ran),
            gap_us=median(r.gap for r in ran),
            nbytes=nbytes,
            gbps=gbps,
            share=gbps / bandwidth(first.place),
            is_kernel=first.is_kernel,
        )

    @property
    def summary(self) -> str:
        """One line about all of it."""
        busy, count = sum(r.device for r in self.ran), max(1, len(self.calls))
        whole, moved = sum(us for _, _, us in self.calls), sum(r.nbytes for r in self.ran)
        places = sorted({r.place for r in self.ran})
        limits = ", ".join(f"{p} {bandwidth(p):.1f} GB/s" for p in places) or "none"
        return (
            f"SUMMARY {len(self.calls)} calls of graphs: {whole / count / 1e3:.4f} ms each, of it"
            f" {busy / count / 1e3:.4f} ms in {len(self.ran) / count:.1f} kernels and calls at"
            f" {moved / max(busy, 1e-3) / 1e3:.2f} GB/s; measured limit: {limits}"
        )

    def __repr__(self) -> str:
        lines, rows = list[str](), self.rows
        for graph in dict.fromkeys(r.graph for r in rows):
            lines += [titled(graph), HEAD, *(str(r) for r in rows if r.graph == graph)]
        return "\n".join([*lines, self.summary])

    def save(self, path: str) -> None:
        """Write the table; a trace for Chrome and Perfetto if the name ends in `.json`."""
        text = json.dumps({"traceEvents": self.events()}) if path.endswith(".json") else f"{self}\n"
        Path(path).write_text(text, encoding="utf-8")

    def events(self) -> list[dict[str, Any]]:
        """The trace: graphs and launches on the host, and the devices with their work."""
        made = [_event(titled(name), "host", start, us) for name, start, us in self.calls]
        ends: dict[str, float] = {}
        for r in self.ran:
            told = {"graph": r.graph, "line": r.line, "bytes": r.nbytes}
            made.append(_event(r.name, "host", r.start, r.host, **told))
            if r.place != "cpu":  # its clock is not the host's: work starts at the launch or later
                begin = max(r.start, ends.get(r.place, 0.0) + r.gap)
                ends[r.place] = begin + r.device
                made.append(_event(r.name, r.place, begin, r.device, **told))
        return made

    def tell(self, path: str | None) -> None:
        """Write a file, or print to standard error, also if that fails; nothing if nothing ran."""
        if self.ran and path is not None:
            try:
                self.save(path)
            except OSError as e:
                print(f"lenz: cannot write {path}: {e.strerror}\n{self}", file=sys.stderr)
        elif self.ran:
            print(self, file=sys.stderr)


def _event(name: str, place: str, start: float, us: float, **told: Any) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": "lenz", "tid": place, "ts": start, "dur": us,
            "args": told}  # fmt: skip


class Timer(Watch):
    """Times the steps of one graph; on GPUs with events, which are read at the end of a call.

    `clock` is the host's time in a call without what the timer itself takes. Gaps on a GPU follow
    from it: work starts when it is launched and the work before it is done.
    """

    def __init__(self, graph: Watched, profile: Profile) -> None:
        super().__init__(graph)
        self.profile, self.kernels, self.lines = profile, graph.kernels, graph.lines
        self.moved: dict[tuple[str, tuple[int, ...]], int] = {}
        self.pending: list[tuple[Ran, Any, Any, float]] = []
        self.launch: dict[int, float] = {}  # microseconds that the launch of a step took
        self.clock = self.held = self.left = 0.0

    def begin(self, args: Tensors) -> None:
        self.pending.clear()
        self.clock = 0.0
        self.began = self.left = _now()

    def before(self, k: int, tensors: Tensors, sizes: Sequence[int] = ()) -> None:
        gap = _now() - self.left
        self.clock += gap
        step = self.steps[k]
        named = [a.value for a in getattr(step, "args", ()) if isinstance(a, Named)]
        found = [str(t.device) for t in tensors if isinstance(t, torch.Tensor)] + named
        place = next((p for p in found if p.startswith("cuda")), "cpu")
        is_kernel = isinstance(step, LaunchStep)
        nbytes = self.bytes_of(step.kernel, tuple(sizes)) if isinstance(step, LaunchStep) else 0
        line = self.lines.get(k, "").split(",")[0]
        start = self.began + self.clock
        self.now = Ran(
            self.graph.name, title_of(step), line, place, start, gap, 0, 0, nbytes, is_kernel
        )
        self.held = EVENTS_US + 2 * self.launch.get(k, LAUNCH_US)
        self.event = _recorded(place, self.held)
        self.since = _now()

    def after(self, k: int, tensors: Tensors) -> None:
        ran, took = self.now, _now() - self.since
        if self.event is not None:
            done = _recorded(ran.place)
            waited = self.event.query()  # for the GPU, or the launch took longer than expected
            took = self.launch[k] = max(0.0, took - self.held) if waited else took
            launched = self.clock + (0.0 if waited else took)
            self.pending.append((ran, self.event, done, launched))
        self.clock += took
        ran.host = ran.device = took
        if not ran.is_kernel:
            alive = {t.data_ptr(): t.nbytes for t in tensors if isinstance(t, torch.Tensor)}
            ran.nbytes = sum(alive.values())
        self.profile.ran.append(ran)
        self.left = _now()

    def end(self, results: Tensors) -> None:
        self.clock += _now() - self.left
        self.profile.calls.append((self.graph.name, self.began, self.clock))
        ends: dict[str, float] = {}
        for ran, start, end, launched in self.pending:
            end.synchronize()
            ran.device = 1e3 * start.elapsed_time(end)
            ran.gap = max(0.0, launched - ends.get(ran.place, launched))
            ends[ran.place] = max(launched, ends.get(ran.place, launched)) + ran.device

    def bytes_of(self, name: str, sizes: tuple[int, ...]) -> int:
        """The bytes that a launch reads and writes, for its sizes."""
        key = name, sizes
        if key not in self.moved:
            k, env = self.kernels[name], self.graph.schedule.graph.env
            hints = {**dict(env.hints), **{v.name: n for v, n in zip(k.sizes, sizes, strict=True)}}
            self.moved[key] = bytes_moved(k, replace(env, hints=tuple(sorted(hints.items()))))
        return self.moved[key]


def _now() -> float:
    return time.perf_counter_ns() / 1e3


def _recorded(place: str, busy: float = 0.0) -> Any:
    """An event on the current stream of a GPU, after `busy` microseconds; None elsewhere."""
    if not place.startswith("cuda"):
        return None
    with torch.cuda.device(place):
        cuda: Any = torch.cuda  # torch gives these functions no types
        if busy:
            cuda._sleep(int(busy * CYCLES_PER_US))
        event = cuda.Event(enable_timing=True)
        event.record()
    return event


@cache
def bandwidth(place: str) -> float:
    """GB/s of a copy on a device, counting read and written bytes."""
    from torch.utils.benchmark import Timer as Clock  # 0.1 s

    source = torch.zeros(STREAM, dtype=torch.uint8, device=place)
    run = {"target": torch.zeros_like(source), "source": source}
    clock = Clock("target.copy_(source)", globals=run, num_threads=torch.get_num_threads())
    return 2 * STREAM / clock.timeit(ROUNDS).mean / 1e9


@cache
def of_process(path: str | None, has_device_time: bool) -> Profile:
    """The profile of all graphs with these options, printed or written when the process ends."""
    made = Profile(has_gaps=not has_device_time)
    atexit.register(made.tell, path)
    return made
