"""Kernels -> binaries: from the store, or from the compile server of this process.

The server is started once and early, so that it imports Triton while the graph is still lowered. It
is a separate process (`worker`). It inherits only `sys.path` and the environment and runs nothing
of the user's program; a crash of LLVM fails one kernel. If a server dies or stops answering, a new
one takes over its kernels. They are never compiled in the user's process.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import TypeAlias

from lenz.ir.binary import Binary, decode, encode
from lenz.machine.cuda.triton.compile import KernelText, version
from lenz.machine.cuda.triton.worker import ALIVE, ANSWER, batch
from lenz.records import dataclass
from lenz.runtime.store import Store

Tell: TypeAlias = Callable[[int, int], None]
MAX_WORKERS = 16
SERVERS = 2  # servers that a batch may lose
CODE = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from lenz.machine.cuda.triton.worker import main; main(int(sys.argv[1]))"
)


@dataclass(frozen=True, slots=True)
class Failed:
    """A kernel that does not compile, and why."""

    name: str
    message: str


def wake() -> None:
    """Start this process's server if it does not run yet; takes 2 ms."""
    _pool(os.getpid()).start()


def keys_of(kernels: Sequence[KernelText], arch: int) -> list[str]:
    """The store's keys of kernels, as `compile_all` uses them."""
    head = f"{version()} sm{arch}\n"
    return [hashlib.sha256((head + k.line()).encode()).hexdigest() for k in kernels]


def compile_all(
    kernels: Sequence[KernelText], arch: int, store: Store | None, tell: Tell = lambda *_: None
) -> list[Binary | Failed]:
    """Compile for compute capability `arch`, or find in `store`; one result per kernel, in order.

    `tell` gets the number of compiled kernels, and of all, after each one. Raises Missing if Triton
    is not installed.
    """
    keys = keys_of(kernels, arch)
    found: list[Binary | Failed | None] = [_stored(store, key) for key in keys]
    missing = [n for n, binary in enumerate(found) if binary is None]
    if missing:
        made = _pool(os.getpid()).compile([kernels[n] for n in missing], arch, tell)
        for n, binary in zip(missing, made, strict=True):
            found[n] = binary
            if store is not None and isinstance(binary, Binary):
                store.put("cubin", keys[n], encode(binary))
    return [x for x in found if x is not None]


def _stored(store: Store | None, key: str) -> Binary | None:
    data = None if store is None else store.get("cubin", key)
    try:
        return None if data is None else decode(data)
    except ValueError:  # of another version of lenz
        return None


class ServerClient:
    """The client of one server; safe to use from threads, one batch at a time.

    A kernel may take `seconds`. A server that is silent for `patience` seconds is abandoned. While
    it works it reports every 2 seconds; it is silent while it imports Triton.
    """

    def __init__(self, *, workers: int = 0, seconds: int = 120, patience: int = 240) -> None:
        self._workers = workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._seconds = seconds
        self._patience = patience
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._owner = os.getpid()
        atexit.register(self.close)

    def start(self) -> None:
        """Start the server if it does not run; `compile` reports a failure."""
        with self._lock, suppress(OSError):
            if not self._closed:
                self._start()

    def compile(
        self, kernels: Sequence[KernelText], arch: int, tell: Tell = lambda *_: None
    ) -> list[Binary | Failed]:
        """Return one result per kernel, in order; a new server takes over from a dead one."""
        done: dict[int, Binary | Failed] = {}
        why = ""
        with self._lock:
            for _ in range(SERVERS):
                left = [n for n in range(len(kernels)) if n not in done]
                if not left or self._closed:
                    break
                try:
                    self._ask(kernels, left, arch, done, tell)
                except (OSError, EOFError) as e:  # it died, cannot start or does not answer
                    self._stop()
                    why = str(e)
                except BaseException:  # an unread answer would go to the next batch
                    self._stop()
                    raise
        failed = f"no compile server was left for it: {why or 'this process ends'}"
        return [done.get(n) or Failed(k.name, failed) for n, k in enumerate(kernels)]

    def close(self) -> None:
        """Kill the server and its children for good; a running batch fails."""
        if os.getpid() == self._owner:  # a fork must not kill its parent's server
            self._closed = True
            if (server := self._server) is not None:
                _kill(server)
            with self._lock:
                self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        """The server; raises OSError."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-c", CODE, str(self._owner), *map(str, sys.path)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the user's program
            )
            assert self._server.stdin is not None
            os.set_blocking(self._server.stdin.fileno(), False)
        return self._server

    def _ask(
        self, kernels: Sequence[KernelText], left: Sequence[int], arch: int,
        done: dict[int, Binary | Failed], tell: Tell,
    ) -> None:  # fmt: skip
        """Send the remaining kernels of a batch and put the answers into `done`.

        Raises OSError or EOFError if the server is gone or silent.
        """
        server = self._start()
        assert server.stdin is not None
        texts = [kernels[n] for n in left]
        request = memoryview(batch(texts, arch, self._workers, self._seconds))
        while request:
            self._wait(server.stdin.fileno(), select.POLLOUT)
            request = request[server.stdin.write(request) or 0 :]
        while len(done) < len(kernels):
            index, works, size = ANSWER.unpack(self._read(server, ANSWER.size))
            data = self._read(server, size)
            if index != ALIVE:
                failed = Failed(texts[index].name, data.decode(errors="replace"))
                done[left[index]] = decode(data) if works else failed
                tell(len(done), len(kernels))

    def _read(self, server: subprocess.Popen[bytes], size: int) -> bytes:
        assert server.stdout is not None
        parts = []
        while size > 0:
            self._wait(server.stdout.fileno(), select.POLLIN)
            parts.append(os.read(server.stdout.fileno(), size))
            if not parts[-1]:
                raise EOFError("the compile server died")
            size -= len(parts[-1])
        return b"".join(parts)

    def _wait(self, pipe: int, event: int) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(self._patience * 1000):
            raise TimeoutError("the compile server does not answer")

    def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            _kill(server)
            with server:  # closes the pipes and waits
                pass


def _kill(server: subprocess.Popen[bytes]) -> None:
    """Kill a server's process group before anyone waits for it: its id is still valid then."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


@cache
def _pool(process: int) -> ServerClient:
    """The pool of the process with this id: a fork must not use its parent's pool."""
    return ServerClient()
