"""The option `background`: a graph runs in eager until another process has compiled it.

The process gets Dynamo's graph, and compiles it into the disk cache. Between two calls the graph is
loaded from there, as in the second process of a program (`warm.py`). A graph that the cache cannot
hold is compiled before its first call, as without the option.
"""

from __future__ import annotations

import atexit
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from queue import SimpleQueue
from typing import IO, Any

import torch

from lenz import keys
from lenz.debug.failing import say
from lenz.errors import UserError
from lenz.frontend.asked import ambient, configured, state
from lenz.frontend.saved import dumped, statics
from lenz.frontend.untraced import outside
from lenz.options import Options
from lenz.records import dataclass
from lenz.respecialise import Compile
from lenz.warm import TraceRecord

FRAME = struct.Struct("<QQ")  # bytes of JSON, and bytes of a graph
CODE = (
    "import sys; sys.path[:] = sys.argv[1:]\n"
    "from lenz.api import compile_for\n"
    "from lenz.first_calls.worker import serve\n"
    "serve(compile_for)"
)


@dataclass(frozen=True, slots=True)
class Request:
    """One graph to compile: its bytes, and the settings that they lack."""

    graph: bytes
    key: str  # of its trace record
    name: str
    options: dict[str, Any]
    sources: str
    state: str
    settings: dict[str, Any]
    statics: list[Any]

    def frame(self) -> bytes:
        """The request as bytes."""
        head = asdict(self)
        head.pop("graph")
        data = json.dumps(head).encode()
        return FRAME.pack(len(data), len(self.graph)) + data + self.graph


class Background:
    """The callable of a graph: eager at first, later the compiled one."""

    def __init__(self, trace: TraceRecord, again: Compile, job: Future[str], name: str) -> None:
        self._trace, self._again, self._name = trace, again, name
        self._lock = threading.Lock()
        self._job: Future[str] | None = job
        self._made: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Run on the arguments of Dynamo's graph."""
        job = self._job
        if job is not None and job.done():
            self._switch()
        run = self._trace.gm.forward if self._made is None else self._made
        return run(*args)

    def _switch(self) -> None:
        """Switch to the compiled graph; if there is none, warn and stay with eager."""
        with self._lock:
            job, self._job = self._job, None
            if job is None:  # another thread was faster
                return
            why = job.result() or self._loaded()
            if why:
                say(f"A graph stays in eager, because compiling it in the background failed: {why}")

    def _loaded(self) -> str:
        """Load the plan from the cache; empty, or why that was not possible."""
        try:
            with self._trace.moment.again():
                made = self._trace.load(self._again, [])
        except Exception as e:  # noqa: BLE001  # the call goes on in eager, with a warning
            return f"{type(e).__name__}: {e}"
        if made is None:
            return "the cache lacks a part of it"
        if self._trace.options.compare_eager:
            from lenz.first_calls.compare import Compared

            made = Compared(made, self._trace.gm.forward, self._name)
        self._made = outside(made, "a graph compiled by lenz")
        return ""


def in_background(
    trace: TraceRecord | None, options: Options, name: str, again: Compile
) -> Background | None:
    """Have another process compile a graph; None, with a warning, if that is impossible."""
    try:
        if trace is None:
            raise UserError("it cannot be taken from the cache")
        if any(not isinstance(s, int) for x in trace.inputs for s in _sizes(x)):
            raise UserError("it has dynamic sizes")
        graph = dumped(trace.gm)
    except UserError as e:
        say(f"lenz compiles a graph before its first call, not in the background: {e.what}")
        return None
    given = asdict(options)
    kept = keys.sources()
    how = (state(), settings(), statics(trace.gm))
    request = Request(graph, trace.key, name, given, kept, *how)
    return Background(trace, again, _process(os.getpid()).ask(request), name)


def _sizes(x: Any) -> tuple[Any, ...]:
    is_symbol = isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return tuple(x.shape) if isinstance(x, torch.Tensor) else (x,) if is_symbol else ()


def settings() -> dict[str, Any]:
    """The parts of torch's state that the compiling process has to set."""
    return {
        **ambient(),
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        "threads": torch.get_num_threads(),
        "aot": configured(),
        "precision": torch.get_float32_matmul_precision(),
    }


class Process:
    """The client of one compiling process, which starts on the first request."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Request, Future[str]]] = SimpleQueue()
        self._server: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._serve, name="lenz background", daemon=True).start()
        atexit.register(self.close)

    def ask(self, request: Request) -> Future[str]:
        """Queue a graph; the result is empty once it is in the cache, else says why not."""
        answer: Future[str] = Future()
        self._queue.put((request, answer))
        return answer

    def close(self) -> None:
        """Kill the process."""
        if self._server is not None:
            self._server.kill()

    def _serve(self) -> None:
        while True:
            self._burst(*self._queue.get())

    def _burst(self, request: Request, answer: Future[str]) -> None:
        """Compile graphs until the queue is empty, with progress on a terminal but not in a log."""
        from tqdm import tqdm

        with tqdm(total=1, desc="lenz", unit="graph", leave=False, disable=None) as line:
            while True:
                line.total = line.n + 1 + self._queue.qsize()
                line.set_postfix_str(request.name)
                answer.set_result(self._answer(request))
                line.update()
                if self._queue.empty():
                    return
                request, answer = self._queue.get()

    def _answer(self, request: Request) -> str:
        try:
            return self._asked(request)
        except (OSError, EOFError, ValueError) as e:  # it did not start, or died
            server, self._server = self._server, None
            if server is not None:
                server.kill()
                server.wait()
            return f"the compiling process failed: {e}"

    def _asked(self, request: Request) -> str:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", CODE, *map(str, sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the user's program
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(request.frame())
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            raise EOFError("it has exited")
        return str(json.loads(line))


@cache
def _process(owner: int) -> Process:
    """The client of this process: a fork cannot use its parent's threads and pipes."""
    return Process()


def requests(stream: IO[bytes]) -> Any:
    """Yield the client's requests until it is gone."""
    while len(head := stream.read(FRAME.size)) == FRAME.size:
        size, more = FRAME.unpack(head)
        with suppress(TypeError, ValueError):  # of another lenz, or the client has died in it
            yield Request(**json.loads(stream.read(size)), graph=stream.read(more))
