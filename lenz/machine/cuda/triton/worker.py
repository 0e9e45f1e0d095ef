"""The process that compiles: it imports Triton once and forks children that compile in parallel.

`pool` starts it and is its only client. A request is a frame with the JSON of a batch; there is one
answer per kernel, in the order in which they are done: `ANSWER`, then a Binary or a message. A
child that crashes or takes too long fails only its kernel. A child that was killed, for example out
of memory, gets a second try. The server has one thread, so that a fork is safe, and leads a process
group, which it kills at the end.

All servers of a user together run at most one child per CPU (`Cores`). 56 servers on 64 CPUs, each
with 16 children, starved single kernels beyond their time limit.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import struct
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from lenz.errors import InternalError
from lenz.ir.binary import encode
from lenz.machine.cuda.triton.compile import KernelText, compile_text
from lenz.private import folder, opened
from lenz.records import dataclass

FRAME = struct.Struct("<Q")  # bytes that follow
ANSWER = struct.Struct("<I?Q")  # index in the batch, is it a Binary, bytes that follow
ALIVE = (1 << 32) - 1  # the index of an answer that only says that the server is alive

POLL_SECONDS = 2.0  # how long it may outlive its parent if another process inherited the pipe
CORE_SECONDS = 0.05  # between requests for a CPU while all are taken
SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies
KILLED = (signal.SIGKILL, signal.SIGTERM)
LOG_BYTES = 2000

# The first kernel of a process takes 75 ms longer: modules, LLVM's targets, pages of the library.
# The first kernel of a fork still takes 20 ms longer, so children are reused.
WARM = """
import triton
import triton.language as tl

@triton.jit
def warm(x, n):
    i = tl.arange(0, 128)
    tl.store(x + i, tl.exp(tl.load(x + i, i < n)), i < n)
"""


def batch(kernels: Sequence[KernelText], arch: int, workers: int, seconds: int) -> bytes:
    """The request to compile `kernels`, `workers` at once, each in at most `seconds`."""
    lines = [k.line() for k in kernels]
    return _frame({"kernels": lines, "arch": arch, "workers": workers, "seconds": seconds})


def _frame(value: dict[str, Any]) -> bytes:
    data = json.dumps(value).encode()
    return FRAME.pack(len(data)) + data


def _read(file: IO[bytes]) -> Any:
    """Read a frame made by `_frame`, or None at the end of the file."""
    size = file.read(FRAME.size)
    return json.loads(file.read(*FRAME.unpack(size))) if len(size) == FRAME.size else None


def main(parent: int) -> None:
    """Serve requests from standard input on standard output while `parent` lives."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text is not an answer
    os.unsetenv("TRITON_INTERPRET")  # this setting turns kernels into Python functions
    with suppress(InternalError):  # a broken Triton reports the error for each kernel
        compile_text(KernelText("warm", WARM, ("*fp32", "i32"), (0,), 4, 1, False), 90)
    gc.freeze()  # children would copy every page that the collector marks
    server = Server(parent, requests, answers)
    try:
        while (data := server.request()) is not None:
            server.run(data["kernels"], data["arch"], data["workers"], data["seconds"])
    except BrokenPipeError:  # its parent is gone
        pass
    except BaseException:  # noqa: BLE001 -- the group is ended below, and this process with it
        traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)


@dataclass(slots=True)
class Child:
    """A process that compiles one kernel at a time: number `index` of the batch, or -1 if idle.

    Through `link` it receives frames of JSON and sends frames of one byte (1 for success) and data.
    """

    pid: int
    link: socket.socket
    log: IO[bytes]
    data: bytes = b""
    index: int = -1
    core: int | None = None
    until: float = 0.0
    is_late: bool = False

    def ask(self, index: int, line: str, arch: int, seconds: int, core: int | None) -> None:
        """Give it kernel `index` of the batch, and a CPU."""
        self.log.seek(0)  # the child shares the file position
        self.log.truncate()
        self.index, self.data = index, b""
        self.core, self.until = core, time.monotonic() + seconds
        with suppress(BrokenPipeError):  # it died idle: the following read notices
            self.link.sendall(_frame({"kernel": line, "arch": arch, "seconds": seconds}))

    def check(self) -> None:
        """Kill it if it takes too long. Other signals it may ignore, or it may be stopped."""
        if not self.is_late and time.monotonic() > self.until:
            self.is_late = True
            os.kill(self.pid, signal.SIGKILL)

    def take(self) -> bool:
        """Read the data that has arrived; True if more will come."""
        part = b""
        with suppress(ConnectionResetError):
            part = self.link.recv(1 << 16)
        self.data += part
        return bool(part) and not self._is_whole()

    def _is_whole(self) -> bool:
        head = self.data[: FRAME.size]
        return len(self.data) > FRAME.size and FRAME.unpack(head)[0] == len(self.data) - FRAME.size

    def result(self, seconds: int, again: bool) -> tuple[bool, bytes] | None:
        """(True, Binary) or (False, reason). A child that died has pid 0 afterwards.

        None if it was killed and may try `again`. The compiler's output follows the message,
        because Triton omits LLVM's errors.
        """
        self.index = -1
        if self._is_whole():
            works, data = self.data[FRAME.size] == 1, self.data[FRAME.size + 1 :]
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.pid = 0
            why = f"signal {-code}" if code < 0 else f"exit code {code}"
            if self.is_late:
                why = f"it took more than {seconds} s"
            elif again and -code in KILLED:
                return None
            works, data = False, f"the process that compiled it died: {why}".encode()
        if not works:
            self.log.seek(0)
            data = b"\n".join((data, self.log.read(LOG_BYTES))).strip()
        return works, data


class Cores:
    """The CPUs of this process as locks shared by all servers of a user, one file each.

    A lock dies with its holder. Without a private folder, or without file locks, only each server's
    own limit applies.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        self._taken: set[int] = set()
        with suppress(OSError, ImportError, AttributeError):
            import fcntl

            self._lock, self._held = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB
            self._free = fcntl.LOCK_UN
            root = os.path.join(tempfile.gettempdir(), f"lenz-{os.getuid()}")
            with folder(root, make=True) as at:
                for cpu in sorted(os.sched_getaffinity(0)):
                    with opened(at, f"cpu{cpu}", os.O_RDWR | os.O_CREAT) as file:
                        self._files.append(os.dup(file))
        first = os.getpid() % max(len(self._files), 1)  # servers start at different locks
        self._files = self._files[first:] + self._files[:first]

    def take(self) -> int | None:
        """A CPU that no server of this user uses; -1 if unknown, None if all are taken."""
        for file in self._files:
            if file not in self._taken:
                with suppress(OSError):
                    self._lock(file, self._held)
                    self._taken.add(file)
                    return file
        return None if self._files else -1

    def give(self, core: int | None) -> None:
        """Return a CPU."""
        if core is not None and core in self._taken:
            self._taken.remove(core)
            self._lock(core, self._free)


class Server:
    """Runs batches; `parent` is the id of the process that it serves."""

    def __init__(self, parent: int, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._parent = parent
        self._requests = requests
        self._answers = answers
        self._children: list[Child] = []
        self._cores = Cores()

    def request(self) -> Any:
        """Wait for the next batch; None at the end."""
        while not self.wait([self._requests.fileno()], POLL_SECONDS):
            pass
        return _read(self._requests)

    def wait(self, pipes: Sequence[int], seconds: float) -> list[int]:
        """Return the `pipes` with data or at their end; exit if the parent is gone."""
        watched = select.poll()
        for pipe in (*pipes, self._requests.fileno()):
            watched.register(pipe, select.POLLIN)
        ready = [pipe for pipe, _ in watched.poll(max(seconds, 0) * 1000)]
        # A parent sends nothing before it has all answers, so its end of the pipe is closed.
        if os.getppid() != self._parent or not {*ready} <= {*pipes}:
            os.killpg(0, signal.SIGKILL)
        return ready

    def run(self, lines: Sequence[str], arch: int, workers: int, seconds: int) -> None:
        """Compile one batch, longest texts first, and answer."""
        order = sorted(range(len(lines)), key=lambda n: len(lines[n]))
        left, tried = len(lines), set[int]()
        asks = told = idle = time.monotonic()
        contended = False
        while left:
            now = time.monotonic()
            busy = [c for c in self._children if c.index >= 0]
            while order and len(busy) < workers and now >= asks:
                core = self._cores.take()
                contended = core is None
                # A server that holds all CPUs for longer than a kernel may take is probably
                # stopped.
                if contended and (busy or now < idle + seconds):
                    asks = now + CORE_SECONDS
                    break
                busy.append(self._free())
                n = order.pop()
                busy[-1].ask(n, lines[n], arch, seconds, core)
            idle = now if busy else idle
            ends = [c.until - now for c in busy if not c.is_late]
            asking = [asks - now] * (bool(order) and len(busy) < workers)
            ready = self.wait([c.link.fileno() for c in busy], min([POLL_SECONDS, *ends, *asking]))
            for child in busy:
                if child.link.fileno() not in ready or child.take():
                    child.check()
                    continue
                n = child.index
                self._cores.give(child.core)
                if contended:
                    asks = time.monotonic() + CORE_SECONDS
                result = child.result(seconds, n not in tried)
                tried.add(n)
                if result is None:
                    order.insert(0, n)  # when the others are done and there is memory
                else:
                    self._tell(n, *result)
                    left -= 1
                if not child.pid:
                    self._drop(child)
            if (now := time.monotonic()) >= told + POLL_SECONDS:
                self._tell(ALIVE, True, b"")
                told = now

    def _tell(self, index: int, works: bool, data: bytes) -> None:
        self._answers.write(ANSWER.pack(index, works, len(data)) + data)
        self._answers.flush()

    def _drop(self, child: Child) -> None:
        self._children.remove(child)
        child.link.close()
        child.log.close()

    def _free(self) -> Child:
        """An idle child, or a new one."""
        for child in self._children:
            if child.index < 0:
                return child
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115 -- open as long as the child lives
        pid = os.fork()
        if pid:
            theirs.close()
            self._children.append(Child(pid, ours, log))
            return self._children[-1]
        try:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            # A child that held these would not notice the end of the server.
            self._requests.close()
            self._answers.close()
            for link in (ours, *(c.link for c in self._children)):
                link.close()
            _serve(theirs)
        except BaseException:  # noqa: BLE001 -- a child never returns into the server's loop
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


def _serve(link: socket.socket) -> None:
    """The loop of a child: compile requests until the server is gone."""
    with suppress(AttributeError):  # without this, an idle child ends when the link closes
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL)
    requests = link.makefile("rb")
    while (data := _read(requests)) is not None:
        _limit(data["seconds"])
        try:
            made = b"\1" + encode(compile_text(KernelText.read(data["kernel"]), data["arch"]))
        except InternalError as e:
            made = b"\0" + e.what.encode()
        link.sendall(FRAME.pack(len(made)) + made)


def _limit(seconds: int) -> None:
    """Make the assembler end soon after the server has killed this process."""
    import resource  # systems without fork have no limits

    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + seconds + 1
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
