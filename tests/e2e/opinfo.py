"""All of torch's op database, every dtype, static and dynamic: run, count, and write the table.

    python tests/e2e/opinfo.py [--workers 2] [--fresh] [--again] [--samples 3] [--only add,mul]
                               [--dtypes float32,...] [--modes static,dynamic] [--report]
                               [--device cuda] [--minutes 10]

Rows go to build/opinfo/ as they are done, so that a run that was stopped, or that `--minutes` ends,
goes on where it was; `--again` runs once more what failed, `--fresh` everything, `--report`
nothing. The table is docs/coverage.md, written once float32 is complete on CPUs. Each op runs
in a worker process: one that dies or hangs is a failure of that op, and another takes its place.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.e2e.readers import together, told  # noqa: E402  # after the path
from tests.e2e.sweep import Row, cases, name_of, sweep  # noqa: E402  # after the path

DTYPES = (
    "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64",
)  # fmt: skip
MODES = ("static", "dynamic")
ROWS = ROOT / "build" / "opinfo"
PAGE = ROOT / "docs" / "coverage.md"
# Seconds for one row: the slowest op (a batch norm of many samples) takes 20 on a busy machine.
LIMIT = 300.0
# Rows after which a worker ends, since Dynamo keeps a little of all it has traced.
LIFE = 150

Key: TypeAlias = tuple[str, str, str]  # op, dtype, mode


def mode_of(row: Row) -> str:
    """The row's mode by name."""
    return "dynamic" if row.dynamic else "static"


def keys(
    only: Sequence[str], dtypes: Sequence[str], modes: Sequence[str], device: str = "cpu"
) -> list[Key]:
    """Every row there is to run: first float32, then the rest shuffled, so that a part tells."""
    import torch

    named = [(name_of(op), op.supported_dtypes(device)) for op in cases(only or None)]
    every = [
        (name, dtype, mode)
        for mode in modes
        for dtype in dtypes
        for name, supported in named
        if getattr(torch, dtype) in supported
    ]
    random.Random(0).shuffle(every)
    return sorted(every, key=lambda k: k[1] != "float32")


def known(path: Path) -> dict[Key, Row]:
    """The rows of earlier runs: of equal keys the last line counts, a cut line does not."""
    rows: dict[Key, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = Row(**json.loads(line))
        except json.JSONDecodeError:
            continue
        rows[row.op, row.dtype, mode_of(row)] = row
    return rows


def serve(samples: int, device: str) -> None:
    """A worker: reads "op dtype mode" lines, writes a row for each."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ops = {name_of(op): op for op in cases()}
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, dtype, mode = json.loads(line)
        layouts = dtype == "float32" and mode == "static"
        row = sweep(ops[name], getattr(torch, dtype), samples, mode == "dynamic", device, layouts)
        print(json.dumps(asdict(row)), file=out, flush=True)


class Worker:
    """A process that runs one row after the other; started when it is first asked."""

    def __init__(self, samples: int, device: str) -> None:
        self.command = [sys.executable, __file__, "--serve", "--device", device]
        self.command += ["--samples", str(samples)]
        self.process: subprocess.Popen[str] | None = None
        self.served = 0

    def run(self, key: Key) -> Row:
        """The row of the key; one with a failure if the process died or took longer than LIMIT."""
        if self.process is None or self.served == LIFE:
            self.close()
            self.process = subprocess.Popen(
                self.command, text=True, cwd=ROOT,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        slow = threading.Timer(LIMIT, process.kill)
        slow.start()
        self.served += 1
        began = time.monotonic()
        try:
            process.stdin.write(json.dumps(key) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        slow.cancel()
        if line:
            return Row(**json.loads(line))
        code = process.wait()
        self.process, self.served = None, 0
        why = "took too long" if time.monotonic() - began >= LIMIT else f"exit status {code}"
        return Row(key[0], key[1], key[2] == "dynamic", failures=[f"the process ended: {why}"])

    def close(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process, self.served = None, 0


def run_all(
    todo: Sequence[Key], made: Sequence[Worker], minutes: float, out: IO[str]
) -> Iterator[Row]:
    """Run the rows in the workers, write each to `out`, give each as it is done."""
    waiting: queue.SimpleQueue[Key] = queue.SimpleQueue()
    done: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
    end = time.monotonic() + 60 * minutes
    for key in todo:
        waiting.put(key)
    stop = threading.Event()

    def work(worker: Worker) -> None:
        while not stop.is_set() and time.monotonic() < end:
            try:
                key = waiting.get_nowait()
            except queue.Empty:
                break
            done.put(worker.run(key))
        worker.close()
        done.put(None)

    threads = [threading.Thread(target=work, args=(w,)) for w in made]
    for t in threads:
        t.start()
    try:
        working = len(threads)
        while working:
            row = done.get()
            if row is None:
                working -= 1
                continue
            print(json.dumps(asdict(row)), file=out, flush=True)
            yield row
    finally:
        stop.set()
        for t in threads:
            t.join()


def follow(todo: Sequence[Key], rows: Iterable[Row]) -> Iterator[Row]:
    """Pass the rows on; prints each failure, and once in a while how far the run is."""
    began = last = time.monotonic()
    failed = 0
    for n, row in enumerate(rows, 1):
        failed += bool(row.failures)
        if row.failures:
            print(f"{mode_of(row)} {row}", flush=True)
        now = time.monotonic()
        if now - last > 15 or n == len(todo):
            last, left = now, (now - began) / n * (len(todo) - n)
            print(f"{n} of {len(todo)} rows, {failed} failed, {left / 60:.0f} min left", flush=True)
        yield row


def share(rows: Iterable[Row], *states: str) -> str:
    """The part of the rows that ran which ended in one of the states, as a count and per cent."""
    ran = [r for r in rows if r.state != "skip"]
    hits = sum(r.state in states for r in ran)
    return f"{hits} of {len(ran)} ({hits / max(1, len(ran)):.1%})"


HEAD = """\
<!-- Written by `make opinfo`; do not edit. -->
# Which ops run natively, and which are calls

A run of torch's own op database ({torch}, CPU, {samples} samples of each op; {run} of {every}
ops, dtypes and modes have run). Each op runs forward, for float32 and float64 also backward, with
`fullgraph=True`. The run compares values, strides, aliasing and the final state of the arguments
with eager's. float32 also covers inputs with gaps and channels-last inputs.

The state of an op and dtype is that of its worst sample:

- **native**: only kernels of lenz;
- **library**: also calls that are left to libraries by choice (matrix products, convolutions,
  attention, Fourier transforms, linear algebra), and no other call;
- **extern**: also other calls of eager ops, each with its reason, or the whole graph in eager;
- **failed**: results differ from eager; or gradients do, or it raises, where `aot_eager` does not;
- **skipped**: eager or `aot_eager` rejects every sample.

float32 ops, forward and backward: native {native}; native or library {library}; native,
not counting library ops: {own}. Forward only: native {forward}.

| mode | dtype | cases that agree | native | library | extern | failed | skipped |
|---|---|---|---|---|---|---|---|
"""


def page(rows: Mapping[Key, Row], samples: int, every: int) -> str:
    """The page, from rows alone, of which there would be `every`."""
    import torch

    first = [r for (_, dtype, mode), r in rows.items() if (dtype, mode) == ("float32", "static")]
    ahead = [replace(r, backward={}) for r in first]
    text = HEAD.format(
        torch=f"torch {torch.__version__.split('+')[0]}",
        samples=samples,
        run=len(rows),
        every=every,
        native=share(first, "native"),
        library=share(first, "native", "library"),
        own=share((r for r in first if r.state != "library"), "native"),
        forward=share(ahead, "native"),
    )
    lines = [text.rstrip("\n")]
    for mode in MODES:
        for dtype in DTYPES:
            some = [r for (_, d, m), r in rows.items() if (d, m) == (dtype, mode)]
            if not some:
                continue
            count = Counter(r.state for r in some)
            sums = [sum(r.passed for r in some)]
            sums += [count[s] for s in ("native", "library", "extern", "FAIL", "skip")]
            lines.append(f"| {mode} | {dtype} | {' | '.join(map(str, sums))} |")
    if readers := together(r.readers for r in rows.values()):
        lines += ["", f"Who ran the plans: {told(readers)}."]
    lines += [
        "",
        "## By op",
        "",
        INTRO,
        "",
        "| op | float32 | calls | other dtypes |",
        "|---|---|---|---|",
    ]
    lines += [line for name in _names(rows) if (line := _line(name, rows))]
    native = [f"`{n}`" for n in _names(rows) if not _line(n, rows)]
    lines += ["", f"Native in every dtype and mode ({len(native)}): {', '.join(native)}.", ""]
    return "\n".join(lines)


INTRO = """\
Ops that are not native everywhere. "Calls" are those of float32 (or else of the first dtype),
with the reason; a call that only the backward graph makes is marked "backward". "Other dtypes"
lists dtypes with a different state, static or dynamic."""


def _names(rows: Mapping[Key, Row]) -> list[str]:
    return sorted({name for name, _, _ in rows})


def _line(name: str, rows: Mapping[Key, Row]) -> str:
    """The row of one op; empty where all of its rows are native."""
    own = {(d, m): rows[name, d, m] for m in MODES for d in DTYPES if (name, d, m) in rows}
    if all(r.state == "native" for r in own.values()):
        return ""
    main = next(iter(own.values()))
    calls = dict.fromkeys(f"`{op}` ({why})" for op, why in sorted(main.externs.items()))
    calls |= dict.fromkeys(f"the whole graph ({why})" for why in sorted(main.whole))
    behind = sorted(set(main.backward.items()) - set(main.externs.items()))
    calls |= dict.fromkeys(f"backward `{op}` ({why})" for op, why in behind)
    others: dict[str, list[str]] = {}
    for (dtype, mode), r in own.items():
        if r.state != main.state:
            label = dtype if mode == "static" else f"{dtype} dynamic"
            others.setdefault(_shown(r), []).append(label)
    other = "; ".join(f"{state}: {', '.join(labels)}" for state, labels in others.items())
    state = _shown(main) if main.dtype == "float32" else f"{main.dtype}: {_shown(main)}"
    return f"| `{name}` | {state} | {', '.join(calls)} | {other} |"


def _shown(row: Row) -> str:
    return {"FAIL": "failed", "skip": "skipped"}.get(row.state, row.state)


def _names_in(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [x for x in given if x not in allowed]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(allowed)}")
        return given

    return read


def options() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--samples", type=int, default=3)
    p.add_argument("--dtypes", type=_names_in(DTYPES), default=list(DTYPES))
    p.add_argument("--modes", type=_names_in(MODES), default=list(MODES))
    p.add_argument("--only", type=lambda text: text.split(","), default=[])
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--minutes", type=float, default=1e6)
    for flag in ("--fresh", "--again", "--report", "--serve"):
        p.add_argument(flag, action="store_true")
    return p.parse_args()


def main() -> int:
    """Run what is missing, write the table; 1 where something failed."""
    a = options()
    if a.serve:
        serve(a.samples, a.device)
        return 0
    every = keys(a.only, a.dtypes, a.modes, a.device)
    ROWS.mkdir(parents=True, exist_ok=True)
    path = ROWS / f"{a.device}.jsonl"
    if a.fresh and not a.only:
        path.unlink(missing_ok=True)
    rows = known(path)
    again = lambda k: a.fresh or k not in rows or (a.again and bool(rows[k].failures))
    todo: list[Key] = [] if a.report else [k for k in every if again(k)]
    print(f"{len(every)} rows, {sum(k in rows for k in every)} known", flush=True)
    workers = [Worker(a.samples, a.device) for _ in range(a.workers)]
    with path.open("a") as out:
        for row in follow(todo, run_all(todo, workers, a.minutes, out)):
            rows[row.op, row.dtype, mode_of(row)] = row
    wanted: dict[Key, Row] = {k: rows[k] for k in every if k in rows}
    for row in wanted.values():
        if row.failures:
            print(f"{mode_of(row)} {row}")
    states = Counter(r.state for r in wanted.values())
    print(", ".join(f"{n} {state}" for state, n in sorted(states.items())))
    print(f"without a fallback: {share(wanted.values(), 'native', 'library')}")
    all_rows = keys([], DTYPES, MODES)
    shown = {k: rows[k] for k in all_rows if k in rows}
    if a.device == "cpu" and shown.keys() >= set(keys([], ["float32"], ["static"])):
        PAGE.write_text(page(shown, a.samples, len(all_rows)))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return int(states["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
