"""Benchmarks on a GPU: eager, lenz and the peer (torch's default backend), interleaved.

python -m benchmarks.gpu [kernels] [models] [graphs] [lengths] [host] [start] [survey]
                         [--only TEXT,...] [--sides eager,lenz] [--quick] [--device cpu]
                         [--workers N] [--limit SECONDS] [--json FILE] [--commit TEXT]

Prints tables and writes benchmarks/results/gpu.json after each row, with the machine and the
commit; rows of an earlier run on the same machine stay where this run has none.  A side that
fails, hangs or breaks the device is noted in its row, and the run goes on without it.  `--quick`
(tiny sizes) checks the harness, also with `--device cpu`, and writes only where `--json` says.
`survey` has more than a hundred networks and runs only if it is named; its workers wait for each
other where they time.  `python -m benchmarks.gpu_report` merges results from elsewhere.  The output
of what fails goes to a .log file beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

from benchmarks import gpu_lengths, gpu_report, host, start
from benchmarks.gpu_kernels import CASES
from benchmarks.gpu_measure import GRAPH_SIDES, SIDES, copy_rates, gpu_machine
from benchmarks.gpu_models import MODELS
from benchmarks.gpu_survey import SURVEY
from benchmarks.gpu_worker import Job
from benchmarks.measure import MARK, PEER, PEER_GRAPHS, Row, caches, commit, note
from benchmarks.start_cases import CASES as CASES_OF_STARTS

USUAL = ("kernels", "models", "graphs", "lengths", "host", "start")
SECTIONS = (*USUAL, "survey")
SECONDS = {"kernels": 0.8, "models": 3.0, "graphs": 4.0, "survey": 1.0}  # for which a case is timed
# The peer compiles in processes of its own; many workers of ours have few of them each.
PEER_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}


class Worker:
    """A child process in a session of its own, and what it says in lines that begin with MARK."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], log: IO[str]) -> None:
        self.log = log
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *args],
            env={**os.environ, **env, "TOKENIZERS_PARALLELISM": "false"},
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.lines.put(line[len(MARK) :])
        self.lines.put(None)

    def messages(self, budget: float, end: float) -> Iterator[Row]:
        """What the worker says; at last {"late": why} or {"ended": exit code}.

        `budget` is the longest silence in seconds, `end` the time.monotonic() of the whole run.
        """
        while True:
            left = min(budget, end - time.monotonic())
            try:
                line = self.lines.get(timeout=max(0.0, left))
            except queue.Empty:
                out_of_time = left < budget
                yield {"late": "the time of the run is over" if out_of_time else
                       f"took more than {budget:.0f} s"}  # fmt: skip
                return
            if line is None:
                yield {"ended": self.process.wait()}
                return
            yield json.loads(line)

    def stop(self) -> None:
        """End the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(slots=True)
class Run:
    """One run of the benchmarks: its settings, and the rows so far."""

    device: str
    quick: bool
    sides: tuple[str, ...]
    budget: float
    end: float
    only: str
    log: IO[str]
    save: Callable[[], None]
    workers: int = 1
    writing: threading.Lock = field(default_factory=threading.Lock)
    origin: Row = field(default_factory=dict)
    groups: dict[str, Row] = field(default_factory=dict)

    def chosen(self, section: str) -> list[str]:
        """The names of the cases of a section that the user asked for."""
        names = {
            "kernels": [c.name for c in CASES],
            "models": list(MODELS),
            "graphs": list(MODELS),
            "lengths": list(gpu_lengths.CASES),
            "host": [f.__name__ for f in host.FUNCTIONS],
            "start": list(CASES_OF_STARTS["cuda"]),
            "survey": list(SURVEY),
        }[section]
        wanted = self.only.lower().split(",")
        return [n for n in names if any(w in n.lower() for w in wanted)]

    def job(self, section: str, names: Sequence[str]) -> Job:
        """The job of a worker; a model needs more seconds for as many rounds."""
        seconds = 0.1 if self.quick else SECONDS.get(section, 0.0)
        known = GRAPH_SIDES if section == "graphs" else SIDES
        sides = tuple(s for s in known if s in self.sides)
        return Job(section, tuple(names), sides, self.device, self.quick, seconds)

    def add(self, section: str, row: Row) -> None:
        """Keep a row, write it and show it."""
        with self.writing:
            self.groups[section]["rows"].append({**row, "commit": self.origin["commit"]})
            self.save()
            note(gpu_report.line(section, row))


def share(run: Run, section: str, env: Mapping[str, str]) -> None:
    """Measure a section by several workers, each with a part of the cases."""
    names = run.chosen(section)
    count = max(1, min(run.workers, len(names)))
    with tempfile.NamedTemporaryFile() as file, ThreadPoolExecutor(count) as pool:
        lock = file.name if count > 1 else ""
        work = [
            pool.submit(measure, run, section, env, names[k::count], lock) for k in range(count)
        ]
        for w in work:
            w.result()


def measure(run: Run, section: str, env: Mapping[str, str], left: list[str], lock: str) -> None:
    """Measure cases of a section in a worker, and in a new one after each that fails."""
    job = replace(run.job(section, left), lock=lock)
    while left:
        job = replace(job, cases=tuple(left))
        at, trouble = _serve(run, section, job, left, env)
        if not left:
            return
        if run.end <= time.monotonic():
            for name in left:
                run.add(section, {"case": name, "failed": "not run: the time of the run is over"})
            return
        if at and at[0] not in left:
            continue  # its row says why no other could follow in the same process
        case, stage = at or (left[0], "start")
        note(f"{section}: {case}, {stage}: {trouble}")
        if stage in job.sides:
            skip = {**job.skip.get(case, {}), stage: trouble}
            job = replace(job, skip={**job.skip, case: skip})
        else:
            run.add(section, {"case": case, "failed": f"{stage}: {trouble}"})
            left.remove(case)


def _serve(
    run: Run, section: str, job: Job, left: list[str], env: Mapping[str, str]
) -> tuple[list[str] | None, str]:
    """Take the rows of one worker out of `left`; return where it ended and why."""
    worker = Worker(["benchmarks.gpu_worker", json.dumps(asdict(job))], env, run.log)
    at: list[str] | None = None
    trouble = ""
    for message in worker.messages(run.budget, run.end):
        if "at" in message:
            at = message["at"]
        elif "row" in message:
            left.remove(message["row"]["case"])
            run.add(section, message["row"])
        elif not trouble:
            trouble = message.get("fatal") or message.get("late") or f"exit {message['ended']}"
    worker.stop()
    return at, trouble


def warm(run: Run, sections: Sequence[str], env: Mapping[str, str]) -> None:
    """Compile everything with the peer in parallel processes, to fill its cache before it is timed.

    What fails here fails again, and is noted, where it is measured.
    """
    asked = {"models" if s == "graphs" else s for s in sections} & {"models", "kernels"}
    names = [(s, n) for s in sorted(asked, reverse=True) for n in run.chosen(s)]
    count = min(os.cpu_count() or 1, 16, len(names))
    began = time.monotonic()
    until = min(run.end, began + 2 * run.budget)
    workers = []
    for k in range(count):
        mine = names[k::count]
        job = replace(run.job(mine[0][0], [n for _, n in mine]), warm=True)
        workers.append(Worker(["benchmarks.gpu_worker", json.dumps(asdict(job))], env, run.log))
    for worker in workers:
        for _ in worker.messages(2 * run.budget, until):
            pass
        worker.stop()
    note(f"the peer compiled {len(names)} cases in {time.monotonic() - began:.0f} s")


def starts(run: Run) -> None:
    """Each start once, in a new process: with empty caches, then with the caches it left."""
    sides = tuple(s for s in start.SIDES if s in (*run.sides, *start.FILES, "dynamo", "aot_eager"))
    for case in run.chosen("start"):
        left = run.end - time.monotonic()
        if left <= 0:
            run.add("start", {"case": case, "failed": "not run: the time of the run is over"})
            continue
        run.add("start", start.measure(case, run.device, 1, sides, min(2 * run.budget, left)))


def everything(run: Run, sections: Sequence[str]) -> None:
    """Run the sections in their order; each has its rows and seconds in `run.groups`."""
    with ExitStack() as stack:
        env = {**stack.enter_context(caches()), **PEER_THREADS}
        if (
            {PEER, PEER_GRAPHS} & {*run.sides}
            and run.device == "cuda"
            and {"kernels", "models", "graphs"} & {*sections}
        ):
            warm(run, sections, env)
        for section in sections:
            began = time.monotonic()
            run.groups[section] = {"rows": [], "quick": run.quick, "machine": run.origin["machine"]}
            if run.workers > 1:
                run.groups[section]["workers"] = run.workers
            if section == "kernels":
                largest = 64 << 10 if run.quick else 1 << 30
                run.groups[section]["copy_gbps"] = copy_rates(run.device, largest)
            note(f"== {section}")
            if section == "start":
                starts(run)
            else:
                share(run, section, env)
            run.groups[section]["seconds"] = round(time.monotonic() - began, 1)
            run.save()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument(
        "--only", default="", help="cases whose name contains one of these texts, between commas"
    )
    parser.add_argument("--sides", default=",".join(GRAPH_SIDES), help="some of %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of one side of a case")
    parser.add_argument("--workers", type=int, default=1, help="processes that measure at once")
    parser.add_argument("--limit", type=float, default=530.0, help="seconds of the whole run")
    parser.add_argument("--json", type=Path, help="where to write; else nothing if --quick")
    parser.add_argument("--commit", default=commit(), help="of the code, where git is not there")
    options = parser.parse_args()
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"unknown section {name!r}: choose from {', '.join(SECTIONS)}")
    for name in options.sides.split(","):
        if name not in GRAPH_SIDES:
            parser.error(f"unknown side {name!r}: choose from {', '.join(GRAPH_SIDES)}")
    return options


def main() -> int:
    """Run, write, print; the exit code is 1 if a side or a case failed or gave wrong results."""
    o = parsed()
    end = time.monotonic() + o.limit
    path = o.json or (None if o.quick else gpu_report.RESULTS)
    made: Row = {"machine": gpu_machine(o.device), "groups": {}}
    former = json.loads(path.read_text()) if path is not None and path.exists() else None

    def save() -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(gpu_report.merged(former, made), indent=1) + "\n")

    with ExitStack() as stack:
        log_path = path.with_suffix(".log") if path else Path(os.devnull)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context(log_path.open("w"))
        sides = tuple(s for s in GRAPH_SIDES if s in o.sides.split(","))
        run = Run(o.device, o.quick, sides, o.budget, end, o.only, log, save, o.workers)
        run.origin, run.groups = {"machine": made["machine"], "commit": o.commit}, made["groups"]
        everything(run, [s for s in SECTIONS if s in (o.sections or USUAL)])
    save()
    print(gpu_report.document(made))
    if path == gpu_report.RESULTS:
        gpu_report.write(gpu_report.merged(former, made))
    rows = [(s, r) for s, g in made["groups"].items() for r in g["rows"]]
    return int(any(gpu_report.faults(s, r) for s, r in rows))


if __name__ == "__main__":
    sys.exit(main())
