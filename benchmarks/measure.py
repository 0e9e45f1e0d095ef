"""How everything here is measured: interleaved rounds, medians, and results compared first.

A machine drifts (clock, other work), so absolute times of two runs do not compare.  One round calls
every contestant once (or `inner` times, when a call is short), in an order that rotates from round
to round, and what is reported beside the median times is the median of the ratios of one round.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

PEER = "inductor"
# The same two as CUDA graphs, where a mode asks for them; lenz's wherever one can be made; and
# Dynamo's guards alone.
LENZ_GRAPHS, PEER_GRAPHS, LENZ_ON, GUARDS = "lenz_graphs", f"{PEER}_graphs", "lenz_on", "guards"
CONTESTANTS = ("eager", "lenz", PEER)
# A sample shorter than this (seconds) is mostly the clock's own cost and scheduling jitter.
SAMPLE = 2e-3
# Begins the lines of a worker's output that are meant for its parent.
MARK = "@@ "
Call = Callable[[], Any]
Row = dict[str, Any]


def fresh(fn: Any) -> Any:
    """Copy a function with a code object of its own.

    Dynamo keeps compiled code per code object; without the copy every contestant would check the
    guards of those compiled before it.
    """
    if not isinstance(fn, FunctionType):
        return fn
    copy = FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def compiled(fn: Any, backend: str) -> Any:
    """Return `fn` behind `backend`; every backend gets the same settings.  `eager` is `fn`."""
    import torch

    if backend == "eager":
        return fn
    return torch.compile(fresh(fn), backend=backend_of(backend), dynamic=False, fullgraph=True)


def backend_of(name: str) -> Any:
    """What torch.compile gets: lenz as a function, since it need not be installed."""
    if name != "lenz":
        return name
    from lenz.api import backend

    return backend


def agree(expected: Any, got: Any, rtol: float, atol: float, eager: Any = None) -> None:
    """Raise AssertionError unless all tensors of `got` are those of `expected`.

    `atol` is in units of the largest finite magnitude of each expected tensor, or of 1 if that is
    less, so that one figure serves sums of thousands of terms and probabilities. Twice the error of
    `eager` is allowed too: it grows where a value lands on the other side of a relu.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    want, have = tree_leaves(expected), tree_leaves(got)
    near = want if eager is None else tree_leaves(eager)
    assert len(want) == len(have), f"{len(have)} results, expected {len(want)}"
    for w, h, e in zip(want, have, near, strict=True):
        if not isinstance(w, torch.Tensor):
            assert w == h, f"{h!r}, expected {w!r}"
        elif not w.is_floating_point():
            assert torch.equal(w, h), f"{int((w != h).sum())} of {w.numel()} values differ"
        else:
            finite = w.detach()[w.detach().isfinite()]
            scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
            off = (e - w).detach().abs()
            most = (
                max(atol * scale, 2.0 * float(off.nan_to_num(0.0, 0.0).max())) if w.numel() else 0.0
            )
            torch.testing.assert_close(
                h, w, rtol=rtol, atol=most, equal_nan=True, check_stride=False
            )


def interleave(
    calls: Mapping[str, Call],
    seconds: float,
    clock: Callable[[], int] = time.perf_counter_ns,
    least: int = 5,
    most: int = 400,
) -> dict[str, list[float]]:
    """Time every call in rounds for about `seconds`; return seconds per call, one per round."""
    names = list(calls)
    for name in names:
        calls[name]()
    inner = max(1, math.ceil(SAMPLE / max(1e-7, min(_once(calls[n], clock, 3) for n in names))))
    took: dict[str, list[float]] = {n: [] for n in names}
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        turn = 0
        while turn < least or (turn < most and time.perf_counter() < end):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                took[name].append(_once(calls[name], clock, inner) / inner)
            turn += 1
    finally:
        gc.enable()
    return took


def _once(call: Call, clock: Callable[[], int], times: int) -> float:
    start = clock()
    for _ in range(times):
        call()
    return (clock() - start) * 1e-9


def row(took: Mapping[str, Sequence[float]]) -> Row:
    """Summarise rounds: medians in microseconds, and medians of each round's ratios."""
    made: Row = {f"{name}_us": statistics.median(t) * 1e6 for name, t in took.items()}
    made["rounds"] = len(next(iter(took.values())))
    for base in took:
        if base != "lenz" and "lenz" in took:
            pairs = zip(took["lenz"], took[base], strict=True)
            made[f"lenz/{base}"] = statistics.median(a / b for a, b in pairs)
    return made


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean; NaN for nothing."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def clock_of(name: str) -> Callable[[], int]:
    """`wall`, or `cpu`: the time of this process's threads, for one thread on a busy machine."""
    return time.process_time_ns if name == "cpu" else time.perf_counter_ns


@contextmanager
def caches() -> Iterator[dict[str, str]]:
    """Give an environment in which every disk cache of every contestant is a new empty folder."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        names = ("LENZ_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        yield {name: str(Path(folder, name.lower())) for name in names}


def child(module: str, args: Sequence[str], env: Mapping[str, str], threads: int) -> Any:
    """Run `python -m benchmarks.<module>` with `threads` threads; return the JSON it prints last.

    Its standard error passes through.  Raises RuntimeError with the exit code if it fails.
    """
    count = str(threads)
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *args, "--threads", count],
        env={**os.environ, **env, "OMP_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"},
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"benchmarks.{module} {' '.join(args)}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def said(e: BaseException) -> str:
    """The first line of an error that says something, with its type."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[0] if lines else ''}"[:300]


def commit() -> str | None:
    """The commit of the code that runs, marked where code differs from it; None without git."""
    root = Path(__file__).parent.parent
    texts = []
    for named in (
        ["rev-parse", "--short", "HEAD"],
        ["status", "--porcelain", "-uno", "--", "*.py"],
    ):
        try:
            done = subprocess.run(
                ["git", *named], cwd=root, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        texts.append(done.stdout.strip())
    return f"{texts[0]} with changes" if texts[1] else texts[0]


def note(text: str) -> None:
    """Show progress on standard error; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def load() -> float:
    """Return the load average of the last minute, or NaN where there is none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return math.nan


def machine() -> dict[str, Any]:
    """Describe the machine: CPU model, cores, memory in GiB, system, Python and torch."""
    import torch

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": _memory(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, OSError, ValueError):
        return None
