"""Logs (LENZ_LOGS, TORCH_LOGS) and debug folders (LENZ_DEBUG=1).

A `Recorder` is the trace of one graph. The time of a stage excludes the stages inside it, so that
stage times add up to the total.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from lenz.debug.names import shown, titled
from lenz.debug.progress import Progress
from lenz.debug.torch_logs import is_on, logger
from lenz.errors import UserError
from lenz.private import folder, make_above, write
from lenz.records import dataclass, field

# A text that the compiler offers -> its log, torch's artifact, and its file in a debug folder.
TEXTS: dict[str, tuple[str, str, str]] = {
    "dynamo": ("", "", "fx_readable.py"),
    "runnable": ("", "", "fx_runnable.py"),
    "fx": ("graph", "", "fx_transformed.py"),
    "graph": ("graph", "", "graph.ir"),
    "ir": ("ir", "", "ir_before_fusion.ir"),
    "fusion": ("fusion", "fusion", "fusion.txt"),
    "schedule": ("schedule", "schedule", "ir_after_fusion.ir"),
    "module": ("", "", "kernels.ll"),
    "code": ("code", "output_code", "plan.py"),
}


class Trace:
    """Receives the compiler's timings and texts; this one records nothing."""

    __slots__ = ()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time the body of a `with` as the stage `name`; stages may be nested."""
        return nullcontext()

    def kernels(self, done: int, of: int) -> None:
        """Tell how many kernels are compiled."""

    def text(self, stage: str, text: Callable[[], str]) -> None:
        """Offer a text of `stage`. `text` is called only if the text is wanted."""


@dataclass(slots=True)
class Recorder(Trace):
    """Times stages and routes texts to standard error (`logs`), to torch's logs, and to a folder.

    `saved` keeps the latest texts as functions, so that a fault can still be written down. `times`
    has the seconds of each stage itself; `failed` is the innermost stage that an error left.
    `line` shows the stages on a terminal.
    """

    name: str
    logs: tuple[str, ...] = ()
    folder: Path | None = None
    times: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    offered: dict[str, Callable[[], str]] = field(default_factory=dict)
    line: Progress = field(default_factory=Progress)
    _stack: list[list[float]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, excluding the stages inside it."""
        start = time.perf_counter()
        self._stack.append([0.0])
        try:
            with self.line.at(self.name, name):
                yield
        except BaseException:
            self.failed = self.failed or name
            raise
        finally:
            total = time.perf_counter() - start
            self.times[name] = self.times.get(name, 0.0) + total - self._stack.pop()[0]
            if self._stack:
                self._stack[-1][0] += total

    def kernels(self, done: int, of: int) -> None:
        """Show how many kernels are compiled."""
        self.line.count(done, of)

    def text(self, stage: str, text: Callable[[], str]) -> None:
        """Print the text if its log is on; write it if there is a debug folder."""
        self.offered[stage] = text
        log, artifact, file = TEXTS.get(stage, (stage, "", f"{stage}.txt"))
        to_torch = bool(log or artifact) and is_on(artifact)
        if log not in self.logs and self.folder is None and not to_torch:
            return
        with self.stage("output"):
            made = one_by_one(text()).rstrip("\n")
            if log in self.logs:
                print(f"[lenz {log}] {titled(self.name)}\n{made}", file=sys.stderr)
            if to_torch:
                logger(artifact).debug("%s of %s\n%s", stage, titled(self.name), made)
            if self.folder is not None:
                write_in(self.folder, {file: made + "\n"})

    def binary(self, file: str, data: bytes) -> None:
        """Write bytes into the debug folder, if there is one."""
        if self.folder is not None:
            with self.stage("output"):
                write_in(self.folder, {file: data})

    def finish(self) -> None:
        """Print the stage times if `time` is logged, and the debug folder's path."""
        self.offered.clear()  # they cover the whole compilation
        total, title = sum(self.times.values()), titled(self.name)
        rows = [f"  {k:<14}{v * 1e3:9.2f} ms" for k, v in self.times.items()]
        table = "\n".join([*rows, f"  {'total':<14}{total * 1e3:9.2f} ms"])
        if "time" in self.logs:
            print(f"[lenz time] {title}\n{table}", file=sys.stderr)
        logger().debug("time of %s\n%s", title, table)
        if self.folder is not None:
            print(f"lenz: debug output of {title} in {self.folder}", file=sys.stderr)


def new_folder(root: str, name: str) -> Path:
    """Make `root/name` for this user alone, or `root/name.1` and so on if that exists.

    Raises UserError if the folder cannot be made.
    """
    name = file_name(name)
    for k in range(100_000):
        folder = Path(root) / (f"{name}.{k}" if k else name)
        try:
            make_above(str(folder))
            folder.mkdir(0o700)
            return folder
        except FileExistsError:
            continue
        except OSError as e:
            told = f"cannot make the debug folder {folder}: {e.strerror}"
            raise UserError(told, hint="set LENZ_DEBUG_DIR") from e
    raise UserError(f"{root} is full of debug folders", hint="delete it")


def one_by_one(text: str) -> str:
    """The lines of a text, each escaped by `shown`: torch prints names as they are."""
    return "\n".join(map(shown, text.split("\n")))


def file_name(name: str) -> str:
    """A name as a file name that is not hidden."""
    return re.sub(r"[^\w.-]|^\.", "_", name, flags=re.ASCII)[:100]


def write_in(path: Path, texts: Mapping[str, str | bytes], make: bool = False) -> None:
    """Write files into a folder of this user; with `make`, make it.

    Raises UserError if that is impossible, because the disk is full for example.
    """
    try:
        with folder(str(path), make=make) as at:
            for name, text in texts.items():
                write(at, file_name(name), text.encode() if isinstance(text, str) else text)
    except OSError as e:
        told = f"cannot write to the debug folder {path}: {e.strerror}"
        raise UserError(told, hint="set LENZ_DEBUG_DIR") from e
