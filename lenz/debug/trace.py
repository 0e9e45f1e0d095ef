"""Logs and debug folders: what LENZ_LOGS prints and LENZ_DEBUG=1 writes.

A `Recorder` is the trace of one graph. Stage times are kept as own time (without the stages inside),
so that they add up to the whole.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

# Stage of the pipeline that offers a text -> file in the debug folder.
FILES = {
    "fx": "fx_readable.py",
    "graph": "fx_graph.txt",
    "ir": "ir_before_fusion.ir",
    "schedule": "ir_after_fusion.ir",
    "module": "kernels.ll",
    "code": "plan.py",
}


@dataclass(slots=True)
class Recorder:
    """Times stages and routes texts to standard error (`logs`) and to a folder (`debug`)."""

    name: str
    logs: tuple[str, ...] = ()
    folder: Path | None = None
    times: dict[str, float] = field(default_factory=dict)
    _stack: list[list[float]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; what inner stages take is theirs and not this one's."""
        start = time.perf_counter()
        self._stack.append([0.0])
        try:
            yield
        finally:
            total = time.perf_counter() - start
            inside = self._stack.pop()[0]
            self.times[name] = self.times.get(name, 0.0) + total - inside
            if self._stack:
                self._stack[-1][0] += total

    def text(self, stage: str, text: Callable[[], str]) -> None:
        """Print the text when its stage is logged, write it when a folder is wanted."""
        if stage not in self.logs and self.folder is None:
            return
        made = text()
        if stage in self.logs:
            print(f"[lenz {stage}] {self.name}\n{made}", file=sys.stderr)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / FILES.get(stage, f"{stage}.txt"), "a", encoding="utf-8") as f:
                f.write(made + "\n")

    def finish(self) -> None:
        """Print the stage times when `time` is logged, and the debug folder's path."""
        if "time" in self.logs:
            total = sum(self.times.values())
            rows = [f"  {k:<14}{v * 1e3:9.2f} ms" for k, v in self.times.items()]
            rows.append(f"  {'total':<14}{total * 1e3:9.2f} ms")
            print(f"[lenz time] {self.name}\n" + "\n".join(rows), file=sys.stderr)
        if self.folder is not None:
            print(f"lenz: debug output of {self.name} in {self.folder}", file=sys.stderr)
