"""Measure the cases of a section in this process, in turn, and tell the parent each step.

A worker of `benchmarks.gpu`: `python -m benchmarks.gpu_worker JOB`, where JOB is JSON.  It prints
lines that begin with MARK: {"at": [case, stage]} before each stage, {"row": {...}} after each case,
and {"fatal": text} before it ends because the device can no longer be used.  The parent restarts it
without the side that was at fault.
"""

from __future__ import annotations

import fcntl
import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import gpu_kernels, gpu_lengths, gpu_models, host
from benchmarks.gpu_kernels import Case, Inputs
from benchmarks.gpu_measure import (
    Clock,
    Watch,
    clock_for,
    cloned,
    copy_call,
    distance,
    error,
    exact,
    host_and_busy,
    level,
    peak,
    side,
    steady,
    timed,
)
from benchmarks.measure import LENZ_GRAPHS, LENZ_ON, MARK, PEER, PEER_GRAPHS, Call, Row, said

# Steps before a side is timed: graphs are recorded, and `auto` times both ways.
STEPS = {LENZ_GRAPHS: 16, LENZ_ON: 6, PEER_GRAPHS: 6}


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is asked to do.

    skip     the sides of a case that failed in a worker before, with their errors
    warm     only compile the peer and call it once, to fill its cache; no rows are made
    seconds  how long a case is timed
    lock     a file that is locked while a model is timed, as several workers run
    """

    section: str
    cases: tuple[str, ...]
    sides: tuple[str, ...]
    device: str
    tiny: bool
    seconds: float
    warm: bool = False
    skip: dict[str, dict[str, str]] = field(default_factory=dict)
    lock: str = ""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other worker of this run times."""
        if not self.lock:
            yield
            return
        with open(self.lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            yield


class Fatal(Exception):
    """The device is unusable in this process: nothing after it would tell anything."""


def tell(**message: Any) -> None:
    print(MARK + json.dumps(message), flush=True)


def attempt(row: Row, case: str, name: str, clock: Clock, run: Callable[[], None]) -> bool:
    """Run the preparation of one side; what it raises becomes a part of the row.

    Raises Fatal if the device answers nothing any more.
    """
    tell(at=[case, name])
    try:
        run()
        clock.sync()
    except Exception as e:  # noqa: BLE001 - a side that fails must not hide the others
        row[f"{name}_failed"] = said(e)
        traceback.print_exc()
        try:
            clock.sync()
        except RuntimeError as broken:
            raise Fatal(f"{said(e)}; {said(broken)}") from e
        return False
    return True


def measure_kernel(case: Case, job: Job, clock: Clock) -> Row:
    """The row of one kernel: milliseconds, bytes and errors of every side."""
    sizes = case.tiny if job.tiny else case.full
    row: Row = {"case": case.name, "size": "x".join(map(str, sizes))}
    tell(at=[case.name, "reference"])
    inputs, wanted = _kernel_reference(case, job)
    calls: dict[str, Call] = {}
    watch = Watch()
    for name in _sides(job, case.name, row):

        def prepare(name: str = name) -> None:
            mine = Inputs(cloned(inputs.args), inputs.upstream) if case.mutates else inputs
            fn = side(case.fn, name, watch, fullgraph=True)
            start = time.perf_counter()
            got = case.call(fn, mine)
            clock.sync()
            row[f"{name}_ready_s"] = time.perf_counter() - start
            row[f"{name}_error"] = case.judge(inputs, got) if case.judge else error(got, wanted)
            row["bytes"] = case.nbytes(inputs, got)
            for _ in range(3):
                case.call(fn, mine)
            calls[name] = lambda: case.call(fn, mine)

        attempt(row, case.name, name, clock, prepare)
    row["tol"] = case.tol
    if "lenz" in calls:
        row |= watch.row()
    wanted = None  # tens of GiB for the largest
    if calls:
        tell(at=[case.name, "timing"])
        row |= timed({"copy": copy_call(row["bytes"], job.device), **calls}, clock, job.seconds)
    for name in calls:
        row[f"{name}_of_copy"] = row["copy_ms"] / row[f"{name}_ms"]
        row[f"{name}_gbps"] = row["bytes"] / row[f"{name}_ms"] / 1e6
    return row


def _kernel_reference(case: Case, job: Job) -> tuple[Inputs, Any]:
    """Inputs, and the results of eager in float64; the latter not where the case judges itself."""
    with torch.device(job.device):
        inputs = case.inputs(job.tiny)
    if case.judge:
        return inputs, None
    return inputs, case.call(case.fn, Inputs(exact(inputs.args), exact(inputs.upstream)))


def measure_model(name: str, job: Job, clock: Clock) -> Row:
    """The row of one model: milliseconds per step, peak memory and errors of every side."""
    row: Row = {"case": name}
    tell(at=[name, "reference"])
    with torch.device(job.device):
        example = gpu_models.example(name, job.tiny)
    wanted, wanted_grads = _model_reference(example)
    runners: dict[str, gpu_models.Runner] = {}
    watch = Watch()
    for who in _sides(job, name, row):

        def prepare(who: str = who) -> None:
            runner = gpu_models.Runner(example, lambda fn: side(fn, who, watch, fullgraph=False))
            # What the allocator leaves between copies of weights is none of a side's memory.
            weights = sum(p.numel() * p.element_size() for p in runner.model.parameters())
            before = level() - weights
            start = time.perf_counter()
            got, grads = runner.result()
            clock.sync()
            row[f"{who}_ready_s"] = time.perf_counter() - start
            row[f"{who}_error"] = distance(got, wanted)
            if wanted_grads:
                row[f"{who}_gradient_error"] = distance(grads, wanted_grads)
            del got, grads
            if who == PEER_GRAPHS:  # its results last until the next step
                step = runner.step
                runner.step = lambda: _marked(step)  # type: ignore[method-assign]
            for _ in range(STEPS.get(who, 3)):
                runner.step()
            if job.device == "cuda":
                row[f"{who}_peak"] = peak(runner.step, clock, before)
            runners[who] = runner

        attempt(row, name, who, clock, prepare)
    if "lenz" in runners:
        row |= watch.row()
    if runners:
        tell(at=[name, "timing"])
        with job.alone():
            row |= steady({who: r.step for who, r in runners.items()}, clock, job.seconds)
    for who, runner in runners.items() if job.section in ("graphs", "survey") else ():

        def look(who: str = who, runner: gpu_models.Runner = runner) -> None:
            with job.alone():
                host, busy = host_and_busy(runner.step, clock)
            row[f"{who}_host_ms"] = host
            if busy:
                row[f"{who}_busy"] = busy / row[f"{who}_ms"]

        attempt(row, name, who, clock, look)
    return row


def _marked(step: Callable[[], None]) -> None:
    torch.compiler.cudagraph_mark_step_begin()
    step()


def _model_reference(example: gpu_models.Example) -> gpu_models.Result:
    """Results and gradients in float32, without the shorter mantissa of tf32."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        return gpu_models.Runner(example.reference(), lambda fn: fn).result()
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


def _sides(job: Job, case: str, row: Row) -> list[str]:
    """The sides to run; those that a worker before this one died of are noted in the row."""
    skip = job.skip.get(case, {})
    row |= {f"{name}_failed": why for name, why in skip.items()}
    return [name for name in job.sides if name not in skip]


def measure_host(name: str, job: Job) -> Row:
    """The row of a function's host cost; one thread, as more add nothing to a tiny kernel."""
    tell(at=[name, "timing"])
    torch.set_num_threads(1)
    fn = next(f for f in host.FUNCTIONS if f.__name__ == name)
    return {"case": name, **host.measure(fn, 3 if job.tiny else 50, job.device)}


def measure_lengths(name: str, job: Job) -> Row:
    """The row of a layer on many lengths."""
    tell(at=[name, "timing"])
    return gpu_lengths.measure(name, job.tiny, job.device)


def warm_kernel(case: Case, job: Job) -> None:
    """Compile and call the peer once."""
    with torch.device(job.device):
        inputs = case.inputs(job.tiny)
    case.call(side(case.fn, PEER, Watch(), fullgraph=True), inputs)


def warm_model(name: str, job: Job) -> None:
    """Compile and run one step of the peer."""
    with torch.device(job.device):
        example = gpu_models.example(name, job.tiny)
    gpu_models.Runner(example, lambda fn: side(fn, PEER, Watch(), fullgraph=False)).result()


def work(job: Job) -> None:
    """Do the job; a failed reference or timing becomes a row with `failed`.

    A model whose package is missing becomes a row with `skipped`.
    """
    clock = None if job.warm else clock_for(job.device)
    cases = {c.name: c for c in gpu_kernels.CASES}
    for name in job.cases:
        torch._dynamo.reset()
        gc.collect()
        if job.device == "cuda":
            torch.cuda.empty_cache()
        try:
            if clock is None:
                warm_kernel(cases[name], job) if name in cases else warm_model(name, job)
            elif job.section == "host":
                tell(row=measure_host(name, job))
            elif job.section == "lengths":
                tell(row=measure_lengths(name, job))
            elif name in cases:
                tell(row=measure_kernel(cases[name], job, clock))
            else:
                tell(row=measure_model(name, job, clock))
        except Fatal:
            raise
        except ModuleNotFoundError as e:
            tell(row={"case": name, "skipped": f"{e.name} is not installed"})
        except Exception as e:  # noqa: BLE001 - one bad case must not hide the others
            traceback.print_exc()
            tell(row={"case": name, "failed": said(e)})
            if clock is not None:
                clock.sync()


def main() -> int:
    """Do the job in the first argument; the exit code is 3 if the device broke."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    job = Job(**{**given, "cases": tuple(given["cases"]), "sides": tuple(given["sides"])})
    warnings.simplefilter("ignore")
    # Sides share the code of a network whose layers are graphs of their own.
    torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]
    try:
        work(job)
    except (Fatal, RuntimeError) as e:
        tell(fatal=said(e))
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
