"""`python -m lenz compare`: a function in eager, in lenz and in torch's default backend, in turns.

Each backend runs the file afresh with the same seed, so that none sees another's training.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lenz.commands.script import function_of
from lenz.debug.precise import leaves, precise
from lenz.errors import some
from lenz.records import dataclass, field

EAGER, LENZ, DEFAULT = "eager", "lenz", "inductor"  # the last one is torch's default backend
WARM = 3  # calls before the clock starts: CUDA graphs are captured in the second
LEAST, MOST = 5, 1000  # rounds
SAMPLE = 2e-3  # seconds; shorter samples are mostly the clock's own time


@dataclass(slots=True)
class Row:
    """One way to run the function: its times in seconds, and the results of the first call."""

    name: str
    call: Callable[[], Any] | None = None
    first: float = 0.0
    times: list[float] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    failed: str = ""

    def stance(self) -> AbstractContextManager[Any]:
        """The context of a call: in eager, parts that the file compiles itself run uncompiled.

        Entering takes half a millisecond, so it must not be timed.
        """
        return torch.compiler.set_stance("force_eager") if self.name == EAGER else nullcontext()

    def timed(self, calls: int) -> float:
        """Seconds per call, of several calls in a row."""
        assert self.call is not None
        with self.stance():
            _wait()
            since = time.perf_counter()
            for _ in range(calls):
                self.call()
            _wait()
            return (time.perf_counter() - since) / calls


def compared_ways(file: str, name: str, seconds: float) -> str:
    """Time a function of a file for about `seconds`; return the table."""
    reference = exact(file, name)
    rows = [_begun(file, name, way) for way in (EAGER, LENZ, DEFAULT)]
    in_turns([r for r in rows if r.call is not None], seconds)
    return "\n".join(shown_rows(f"{name}() of {file}", rows, reference))


def exact(file: str, name: str) -> Row:
    """The function in double precision; `failed` says why there is no result."""
    row = Row("float64")
    fn = fresh(file, name)
    before = torch.random.get_rng_state()
    try:
        with torch.compiler.set_stance("force_eager"), precise():
            row.results = tensors_of(fn())
    except Exception as e:  # noqa: BLE001  # an op that has no double form, say
        row.failed = f"it does not run in float64: {_line(e)}"
    if not torch.equal(before, torch.random.get_rng_state()):
        row.failed = f"{name}() draws random numbers, which each backend does in its own way"
    elif not row.results and not row.failed:
        row.failed = f"{name}() returns no tensors"
    return row


def _begun(file: str, name: str, way: str) -> Row:
    """Compile the function and call it a few times; `failed` says why that is not possible."""
    row, fn = Row(way), fresh(file, name)
    run = fn if way == EAGER else torch.compile(fn, backend=way)
    try:
        with row.stance():
            since = time.perf_counter()
            out = run()
            _wait()
            row.first = time.perf_counter() - since
            row.results = tensors_of(out)
            for _ in range(WARM):
                run()
        row.call = run
    except Exception as e:
        if way == EAGER:  # the program's own error
            raise
        row.failed = f"cannot run: {_line(e)}"
    return row


def fresh(file: str, name: str) -> Callable[[], Any]:
    """The function, from a new run of the file; the seed makes all runs the same."""
    torch.manual_seed(0)
    fn = function_of(file, name)
    torch.manual_seed(0)
    return fn


def in_turns(rows: Sequence[Row], seconds: float) -> None:
    """Time all in rounds, in an order that rotates from round to round."""
    gc.collect()
    calls = max(1, round(SAMPLE / max(1e-7, min(row.timed(3) for row in rows))))
    end, turn = time.perf_counter() + seconds, 0
    while turn < LEAST or (turn < MOST and time.perf_counter() < end):
        shift = turn % len(rows)
        for row in (*rows[shift:], *rows[:shift]):
            row.times.append(row.timed(calls))
        turn += 1


def shown_rows(title: str, rows: Sequence[Row], reference: Row) -> Iterator[str]:
    """The lines of the result."""
    rounds, eager, threads = len(rows[0].times), rows[0].times, torch.get_num_threads()
    yield f"{title}: medians of {rounds} rounds in turns, {some(range(threads), 'thread')}\n"
    yield f"{'':<10}{'first call':>12}{'a call':>14}{'of eager':>10}{'error':>11}"
    for row in rows:
        if row.failed:
            yield f"{row.name:<10}{row.failed}"
            continue
        ratio = median(mine / its for mine, its in zip(row.times, eager, strict=True))
        error = "-" if reference.failed else worst(row.results, reference.results)
        took = f"{row.first:>10.2f} s{median(row.times) * 1e3:>11.3f} ms"
        yield f"{row.name:<10}{took}{ratio:>10.2f}{error:>11}"
    yield ""
    if reference.failed:
        yield f"There are no errors: {reference.failed}."
    else:
        yield "error: the largest difference from float64, in parts of the result's largest value."


def worst(results: Sequence[Tensor], reference: Sequence[Tensor]) -> str:
    """The largest error of some tensors, as text."""
    same = [r.shape for r in results] == [w.shape for w in reference]
    return f"{distance(results, reference):.1e}" if same else "shapes"  # differ


def distance(results: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest error of some tensors: relative to the largest magnitude of each.

    Infinite if their shapes differ.
    """
    if [r.shape for r in results] != [w.shape for w in reference]:
        return float("inf")
    found = 0.0
    for have, want in zip(results, reference, strict=True):
        if not want.numel():
            continue
        a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (have, want))
        same = (a == b) | (a.isnan() & b.isnan())
        finite = b[b.isfinite()].abs()
        scale = float(finite.max()) if finite.numel() else 0.0
        far = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        found = max(found, float(far.max()) / (scale or 1.0))
    return found


def tensors_of(out: Any) -> list[Tensor]:
    """Copies of the tensors of a result: a later call may write into them."""
    return [t.detach().cpu().clone() for t in leaves(out)]


def _wait() -> None:
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)


def _line(e: Exception) -> str:
    """The error in one line. Dynamo's errors have the backend's message in the second line."""
    return " ".join(f"{type(e).__name__}: {e}".split("\n")[:2]).strip()[:200]
