"""The process that compiles: it imports Triton once and forks children that compile in parallel.

`pool` starts it and is its only client.  A request is a frame with the JSON of a batch; there is
one answer per kernel, in the order in which they are done: `ANSWER`, then a Binary or a message.
A child that crashes or takes too long fails its kernel and nothing more.  The server has one
thread, so that a fork is safe, and leads a process group: it ends by killing that group.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import struct
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from lenz.codegen.triton.compile import KernelText, compile_text
from lenz.errors import InternalError
from lenz.ir.binary import encode

FRAME = struct.Struct("<Q")  # bytes that follow
ANSWER = struct.Struct("<I?Q")  # index in the batch, is it a Binary, bytes that follow

POLL_SECONDS = 2.0  # how long it may outlive a parent whose end of the pipe was inherited
LOG_BYTES = 2000

# The first kernel of a process takes 75 ms longer: modules, LLVM's targets, pages of the library.
# In the first kernel of a fork 20 ms are left of that, hence children stay for further ones.
WARM = """
import triton
import triton.language as tl

@triton.jit
def warm(x, n):
    i = tl.arange(0, 128)
    tl.store(x + i, tl.exp(tl.load(x + i, i < n)), i < n)
"""


def batch(kernels: Sequence[KernelText], arch: int, workers: int, seconds: int) -> bytes:
    """Give the request to compile `kernels`, `workers` at once, each in at most `seconds`."""
    lines = [k.line() for k in kernels]
    return _frame({"kernels": lines, "arch": arch, "workers": workers, "seconds": seconds})


def _frame(value: dict[str, Any]) -> bytes:
    data = json.dumps(value).encode()
    return FRAME.pack(len(data)) + data


def _read(file: IO[bytes]) -> Any:
    """Read what `_frame` made, or None at the end of the file."""
    size = file.read(FRAME.size)
    return json.loads(file.read(*FRAME.unpack(size))) if len(size) == FRAME.size else None


def main(parent: int) -> None:
    """Serve requests from standard input on standard output for as long as `parent` lives."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anyone prints is no answer
    os.unsetenv("TRITON_INTERPRET")  # it turns kernels into Python functions
    with suppress(InternalError):  # a Triton that does not work says so for each kernel
        compile_text(KernelText("warm", WARM, ("*fp32", "i32"), (0,), 4, 1, False), 90)
    gc.freeze()  # children would copy each page that the collector marks
    server = Server(parent, requests, answers)
    while server.wait([requests.fileno()]) and (data := _read(requests)) is not None:
        server.run(data["kernels"], data["arch"], data["workers"], data["seconds"])


@dataclass(slots=True)
class Child:
    """A process that compiles one kernel at a time: number `index` of the batch, or -1 if idle.

    Through `link` it gets frames of JSON and gives frames of one byte (1 for success) and data.
    """

    pid: int
    link: socket.socket
    log: IO[bytes]
    data: bytes = b""
    index: int = -1

    def ask(self, index: int, line: str, arch: int, seconds: int) -> None:
        """Give it kernel `index` of the batch."""
        self.log.seek(0)  # the position is the child's too
        self.log.truncate()
        self.index, self.data = index, b""
        with suppress(BrokenPipeError):  # it died idle: the read that follows finds out
            self.link.sendall(_frame({"kernel": line, "arch": arch, "seconds": seconds}))

    def take(self) -> bool:
        """Take in what has come; True if more will come."""
        part = b""
        with suppress(ConnectionResetError):
            part = self.link.recv(1 << 16)
        self.data += part
        return bool(part) and not self._is_whole()

    def _is_whole(self) -> bool:
        head = self.data[: FRAME.size]
        return len(self.data) > FRAME.size and FRAME.unpack(head)[0] == len(self.data) - FRAME.size

    def result(self, seconds: int) -> tuple[bool, bytes]:
        """Whether it made a Binary, and the Binary or why not.  A child that died has pid 0 then.

        What the compiler printed follows a message: Triton leaves out what LLVM has to say.
        """
        self.index = -1
        if self._is_whole():
            works, data = self.data[FRAME.size] == 1, self.data[FRAME.size + 1 :]
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.pid = 0
            why = f"signal {-code}" if code < 0 else f"exit code {code}"
            if code == -signal.SIGALRM:
                why = f"it took more than {seconds} s"
            works, data = False, f"the process that compiled it died: {why}".encode()
        if not works:
            self.log.seek(0)
            data = b"\n".join((data, self.log.read(LOG_BYTES))).strip()
        return works, data


class Server:
    """Runs batches; `parent` is the id of the process that it serves."""

    def __init__(self, parent: int, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._parent = parent
        self._requests = requests
        self._answers = answers
        self._children: list[Child] = []

    def wait(self, pipes: Sequence[int]) -> list[int]:
        """Return those of `pipes` that have data or ended; end all if the parent is gone."""
        watched = select.poll()
        for pipe in (*pipes, self._requests.fileno()):
            watched.register(pipe, select.POLLIN)
        while True:
            ready = [pipe for pipe, _ in watched.poll(POLL_SECONDS * 1000)]
            # A parent asks for nothing before it has all answers: its end of the pipe is closed.
            if os.getppid() != self._parent or not {*ready} <= {*pipes}:
                os.killpg(0, signal.SIGKILL)
            if ready:
                return ready

    def run(self, lines: Sequence[str], arch: int, workers: int, seconds: int) -> None:
        """Compile one batch, the longest texts first, and answer."""
        order = sorted(range(len(lines)), key=lambda n: len(lines[n]))
        left = len(lines)
        while left:
            while order and (child := self._idle(workers)):
                n = order.pop()
                child.ask(n, lines[n], arch, seconds)
            busy = [c for c in self._children if c.index >= 0]
            ready = self.wait([c.link.fileno() for c in busy])
            for child in busy:
                if child.link.fileno() not in ready or child.take():
                    continue
                n = child.index
                works, data = child.result(seconds)
                self._answers.write(ANSWER.pack(n, works, len(data)) + data)
                self._answers.flush()
                left -= 1
                if not child.pid:
                    self._children.remove(child)
                    child.link.close()
                    child.log.close()

    def _idle(self, workers: int) -> Child | None:
        """A child with nothing to do, forked if there are less than `workers`."""
        for child in self._children:
            if child.index < 0:
                return child
        if len(self._children) >= workers:
            return None
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115 -- it stays open as long as the child lives
        pid = os.fork()
        if pid:
            theirs.close()
            self._children.append(Child(pid, ours, log))
            return self._children[-1]
        try:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            # Without these, a child would not notice the end of the server.
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
    """The life of a child: compile what comes until the server is gone."""
    requests = link.makefile("rb")
    while (data := _read(requests)) is not None:
        _limit(data["seconds"])
        try:
            made = b"\1" + encode(compile_text(KernelText.read(data["kernel"]), data["arch"]))
        except InternalError as e:
            made = b"\0" + e.what.encode()
        signal.alarm(0)
        link.sendall(FRAME.pack(len(made)) + made)


def _limit(seconds: int) -> None:
    """End this process after `seconds`, and the assembler that it leaves behind soon after."""
    import resource  # there is none where there is no fork

    signal.alarm(seconds)
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = used + seconds + 1
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
