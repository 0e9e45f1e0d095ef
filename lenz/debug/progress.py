"""A progress line on the terminal while a graph compiles for more than two seconds.

It shows the graph, the stage, and the number of compiled kernels. Pipes, files and notebooks get no
line, since they are not terminals. tqdm draws it, so that it works with the program's own bars.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lenz.debug.names import titled
from lenz.records import dataclass, field

AFTER = 2.0  # seconds without a line
EVERY = 0.2  # seconds between two looks at the stage


@dataclass(slots=True)
class Progress:
    """The progress of one graph's compilation; `is_on` is the option."""

    is_on: bool = False
    _stages: list[tuple[str, str]] = field(default_factory=list)
    _kernels: str = ""
    _since: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def at(self, name: str, stage: str) -> Iterator[None]:
        """Run the body as a stage of the graph `name`. The outermost stage owns the line."""
        is_first = not self._stages and self.is_on and is_terminal()
        self._stages.append((name, stage))
        if is_first:
            self._since, self._kernels, self._over = time.monotonic(), "", threading.Event()
            line = threading.Thread(target=self._show, name="lenz progress", daemon=True)
            line.start()
        try:
            yield
        finally:
            if is_first:
                self._over.set()
                line.join()  # the line is gone before anything else is printed
            self._stages.pop()

    def count(self, done: int, of: int) -> None:
        """Set the number of compiled kernels."""
        self._kernels = f", {done} of {of} kernels"

    def _show(self) -> None:
        if self._over.wait(AFTER):
            return
        from tqdm import tqdm

        columns, rows = shutil.get_terminal_size()  # some terminals say 0: 80 x 24 then
        with tqdm(bar_format="{desc}", leave=False, ncols=columns - 1, nrows=rows) as line:
            while not self._over.is_set():
                line.set_description_str(self.text())
                self._over.wait(EVERY)

    def text(self) -> str:
        """The line."""
        name, stage = self._stages[-1]
        seconds = time.monotonic() - self._since
        return f"lenz compiles {titled(name)}: {stage}{self._kernels}, {seconds:.0f} s"


def is_terminal() -> bool:
    """Whether standard error is one; programs without a console have none at all."""
    ask = getattr(sys.stderr, "isatty", None)
    return ask is not None and ask()
