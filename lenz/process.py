"""Run a job in a process of its own, which may die or hang."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import signal
import traceback
from collections.abc import Callable
from typing import Any

import torch

# What a compilation imports late: new processes have it already. One that is absent is left out.
LOADED = (
    "torch._dynamo", "torch.export._trace", "torch.distributed.tensor.experimental._func_map",
    "lenz.api", "lenz.machine.cpu.machine",
)  # fmt: skip


def ask(job: Callable[..., Any], *args: Any, seconds: float) -> tuple[Any, str]:
    """Run a job in a new process, which is killed after so many seconds.

    Returns its value, or None and how it ended.
    """
    # Dynamo's import may ask for GPUs, and a fork of a process that did so cannot use them.
    forks = "forkserver" in multiprocessing.get_all_start_methods() and not torch.version.cuda
    place: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        place.set_forkserver_preload([*LOADED, job.__module__])
    here, there = place.Pipe(duplex=False)
    process = place.Process(target=_serve, args=(there, job, args))
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            return None, f"hangs: it has no result after {seconds:.0f} s"
        value, why = here.recv()
        process.join(10)  # it frees what it shares with others
        return value, why
    except EOFError:
        process.join()
        code = process.exitcode
        return None, f"dies of {signal.Signals(-code).name}" if code < 0 else f"exits with {code}"
    finally:
        process.kill()
        process.join()


def _serve(said: Any, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Send what a job returns; what it prints is dropped."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            answer = job(*args), ""
    except BaseException:  # noqa: BLE001  # also a SystemExit of the program
        answer = None, traceback.format_exc()
    said.send(answer)
