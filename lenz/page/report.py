"""The result of `lenz.explain`: a whole call, printed in a few lines or saved as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

from lenz.debug.names import titled
from lenz.debug.profile import Profile, Ran
from lenz.debug.report import AllocReport, ExternReport, GraphReport, KernelReport, work_of
from lenz.debug.work import machine
from lenz.errors import UserError, some
from lenz.page.sections import report_data
from lenz.page.texts import sources_of
from lenz.page.write import page
from lenz.records import dataclass, field

MOST = 10  # launches and calls that a printed report lists


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """A whole call: graphs in order of compilation, launches in order of execution.

    Printed, or displayed by a notebook, it is its totals and the ten costliest launches and calls.
    `save` writes all of it. `details` has the data of each graph that only the page shows, `ran`
    the timed calls, if there were any.
    """

    graphs: tuple[GraphReport, ...]
    launches: tuple[KernelReport | ExternReport, ...]
    result: object
    details: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    ran: Profile | None = None
    recompiles: tuple[Mapping[str, str], ...] = ()

    @property
    def allocs(self) -> tuple[AllocReport, ...]:
        """Allocations of all graphs."""
        return tuple(a for g in self.graphs for a in g.allocs)

    @property
    def op_calls(self) -> tuple[int, int, int]:
        """The numbers of op calls computed by kernels (or as views), by libraries, and by eager.

        Each graph counts once, as captured: before anything is fused or dropped.
        """
        every = sum(n for g in self.graphs for n in g.calls.values())
        called = [e for g in self.graphs for e in g.externs if e.op in g.calls]
        fallbacks = sum(e.is_fallback for e in called)
        return every - len(called), len(called) - fallbacks, fallbacks

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report as one HTML file, which opens offline; as data if it ends in `.json`.

        The file holds the lines of the user's that the report names. Raises OSError, and UserError
        for another ending.
        """
        if Path(path).suffix not in ("", ".html", ".htm", ".json"):
            raise UserError(f"{path}: a report is an .html or a .json file")
        data = self.data()
        text = json.dumps(data, indent=1) + "\n" if str(path).endswith(".json") else page(data)
        Path(path).write_text(text, encoding="utf-8")

    def data(self) -> dict[str, Any]:
        """All of it as plain data: numbers, texts, lists and dicts."""
        told = zip(self.graphs, self.details, strict=True)
        graphs = [{**report_data(g), **d, "steps": self._steps(g, d)} for g, d in told]
        steps = [s for g in graphs for s in g["steps"]]
        machines = {p: machine(p) for p in sorted({s["place"] for s in steps})}
        return {
            "graphs": graphs,
            "launches": len(self.launches),
            "ops": dict(zip(("kernels", "libraries", "eager"), self.op_calls, strict=True)),
            "machines": {p: m for p, m in machines.items() if m is not None},
            "recompiles": self.recompiles,
            "sources": sources_of(line for s in steps for line in s["lines"]),
            "profile": self.ran and {"summary": self.ran.summary, "events": _last(self.ran)},
        }

    def _steps(self, g: GraphReport, details: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The steps of a graph with their estimated and their measured microseconds."""
        steps: list[dict[str, Any]] = details["steps"]
        ran = [r for r in self.ran.ran if r.graph == g.name] if self.ran is not None else []
        order = [m.what for m in g.timeline]
        # Calls that broke an assumption ran other steps: then none is known to be timed.
        times = len(ran) // max(1, len(order))
        same = len(order) == len(steps) and [r.name for r in ran] == order * times
        return [s | _times(s, ran[k :: len(steps)] if same else []) for k, s in enumerate(steps)]

    def __repr__(self) -> str:
        steps = self._costliest()
        native, library, eager = self.op_calls
        moved = sum(s["times"] * (s["bytes_read"] + s["bytes_written"]) for s in steps)
        peak = max((g.peak for g in self.graphs), default=0)
        took = sum(sum(g.timings.values()) for g in self.graphs)
        counts = some(self.graphs, "graph"), f"{some(self.launches, 'launch')} in this call"
        ops = f"ops: {native} in kernels, {library} in libraries, {eager} in eager"
        memory = f"{moved / 1e6:.3f} MB read and written, at most {peak / 1e6:.3f} MB alive"
        lines = ["; ".join((*counts, ops)), f"{memory}, {took * 1e3:.0f} ms to compile"]
        lines += [f"  {_told(s)}" for s in steps[:MOST]]
        if len(steps) > MOST:
            lines.append(f"  and {len(steps) - MOST} more, which `save` writes")
        lines += [repr(g).partition("\n")[0] for g in self.graphs[:MOST]]
        lines += ["torch captured no graph: TORCH_LOGS=graph_breaks says why"] * (not self.graphs)
        for g in self.graphs:
            notes = [f"runs in eager: {why}" for why in g.skips]
            notes += [f"graph break: {g.ended_by}"] * bool(g.ended_by)
            notes += [f"CUDA graph: {g.cuda_graph}"] * bool(g.cuda_graph)
            lines += [f"{titled(g.name)}: {note}" for note in notes]
        return "\n".join(lines)

    def _costliest(self) -> list[dict[str, Any]]:
        """Launches and calls with their times, the costliest first; equal ones are counted."""
        found: dict[tuple[object, ...], dict[str, Any]] = {}
        for g, d in zip(self.graphs, self.details, strict=True):
            for s in self._steps(g, d):
                key = g.name, s["name"], *s["lines"]
                row = found.setdefault(key, s | {"times": 0, "total": 0.0})
                us = s["us"] or 0.0 if s["measured"] is None else s["measured"]["device"]
                row["times"], row["total"] = row["times"] + 1, row["total"] + us
        return sorted(found.values(), key=lambda s: -s["total"])


def _told(s: Mapping[str, Any]) -> str:
    """A launch or call in a line."""
    about = "" if s["measured"] is not None else "about "
    us = s["total"]
    took = about + (f"{us:.1f} us" if us < 1e3 else f"{us / 1e3:.2f} ms")
    at = f" at {s['lines'][-1]}" if s["lines"] else ""
    times = f" ({s['times']} times together)" if s["times"] > 1 else ""
    if s["what"] != "kernel":
        return f"call {s['name']} ({s['kind']}): {took}{at}{times}"
    nodes = [o for o in s["origins"] if o not in s["lines"]]
    done = work_of(s["bytes_read"], s["bytes_written"], nodes)
    return f"kernel {s['name']} ({s['kind']}): {took}, {done}{at}{times}"


def _times(s: Mapping[str, Any], ran: Sequence[Ran]) -> dict[str, Any]:
    """Microseconds of a step: estimated by its work if its device is known, and measured."""
    us, here = None, machine(s["place"])
    if here is not None:
        moving = (s["bytes_read"] + s["bytes_written"]) / here["gbps"] / 1e3
        us = max(moving, s["flops"] / max(here["gflops"].values()) / 1e3)
    parts = {p: median(getattr(r, p) for r in ran) for p in ("device", "host", "gap") if ran}
    return {"us": us, "measured": parts or None}


def _last(ran: Profile) -> list[dict[str, Any]]:
    """The events of the last timed call of each graph."""
    since = {name: start for name, start, _ in ran.calls}
    return [e for e in ran.events() if e["args"] and e["ts"] >= since[e["args"]["graph"]]]
