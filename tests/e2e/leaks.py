"""Whether a long-lived process stays as it is: memory, open files, memory maps, memory of a GPU.

    python -m tests.e2e.leaks [--cycles 1000] [--calls 1000000] [--raising 1000] [--device cuda]

Three kinds of work, each in a process of its own: cycles of compile, run and `torch._dynamo.reset`,
each for sizes of its own; calls of compiled functions, of a training step and of changing sizes;
calls that raise. Each process is looked at 60 times. The level of the last third of these looks
may stand above the level of the middle third by no more than `BOUNDS`; Dynamo itself keeps memory
for each compilation, so that cycles are held against as many of `aot_eager`, and llvmlite for each
object that it links (docs/upstream/llvmlite_linked_objects.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lenz.ir import interned

ROOT = Path(__file__).parents[2]
LOOKS = 60
# Growth from the middle third of the looks to the last one. malloc keeps a MiB here and there.
BOUNDS = {"resident KiB": 2048.0, "files": 0.0, "maps": 4.0, "GPU KiB": 0.0}
# Cycles: resident memory may grow this many times as much as aot_eager's, plus the above.
BESIDE = 1.3
# KiB of one cycle: llvmlite keeps 8 of each of four objects, kernels and plan of two halves
# (docs/upstream/llvmlite_linked_objects.py).
LINKED = 4 * 8.0
WIDTH = 16


def step(x: Tensor, w: Tensor) -> Tensor:
    """A graph with a matrix product, norms and a sum, and its backward half."""
    y = F.layer_norm(F.gelu(x @ w), (WIDTH,)).softmax(-1)
    return (y * 2 + x.sum(-1, keepdim=True)).relu().square().mean()


def cycle(k: int, backend: str = "lenz", device: str = "cpu") -> None:
    """Compile a training step for sizes of its own, run it, and forget it.

    The disk cache has every other one.
    """
    x = torch.randn(8 + k, 24 + 3 * k, device=device)
    w = torch.randn(24 + 3 * k, WIDTH, device=device, requires_grad=True)
    options: dict[str, Any] | None = {"cache": k % 2 == 0} if backend == "lenz" else None
    torch.compile(step, backend=backend, dynamic=False, options=options)(x, w).backward()
    torch._dynamo.reset()


def look() -> dict[str, float]:
    """What this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {
        "resident KiB": pages * os.sysconf("SC_PAGE_SIZE") / 1024,
        "files": float(len(os.listdir("/proc/self/fd"))),
        "maps": float(len(Path("/proc/self/maps").read_text().splitlines())),
    }
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        found["GPU KiB"] = torch.cuda.memory_allocated() / 1024
    return found


def growth(looks: list[dict[str, float]]) -> dict[str, float]:
    """By how much the last third of the looks stands above the middle one."""
    third = len(looks) // 3
    middle, last = looks[third : 2 * third], looks[2 * third :]
    return {k: median([x[k] for x in last]) - median([x[k] for x in middle]) for k in looks[0]}


def cycles(count: int, device: str, backend: str = "lenz") -> Iterator[None]:
    """Cycles, in which sizes come again after 200."""
    for k in range(count):
        cycle(k % 200, backend, device)
        interned.release()
        yield


def calls(count: int, device: str) -> Iterator[None]:
    """Calls of one function, and in a tenth of them of a training step and of changing sizes."""
    fast = torch.compile(lambda x: torch.softmax(x @ x, -1).sum(0) + 1, backend="lenz")
    sized = torch.compile(lambda x: x.softmax(-1).cumsum(0), backend="lenz", dynamic=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).to(device)
    run = torch.compile(model, backend="lenz")
    x = torch.randn(8, 8, device=device)
    rows = [torch.randn(n, 8, device=device) for n in range(2, 20)]
    for k in range(count):
        with torch.no_grad():
            fast(x)
        if k % 10 == 0:
            sized(rows[k // 10 % len(rows)])
            run(x).sum().backward()
            model.zero_grad()
        yield


def raising(count: int, device: str) -> Iterator[None]:
    """Calls that raise: in a kernel, in a library, for memory, and for a wrong argument."""
    table = torch.randn(1 << 14, 4, device=device)
    wrong = torch.tensor([1, 1 << 20], device=device)
    pivots = torch.full((64,), 1000, dtype=torch.int32, device=device)
    at = torch.compile(lambda t, i: (t + 1)[i] * 2, backend="lenz")
    big = torch.compile(lambda x, n: x.expand(n, 3) + 1, backend="lenz", dynamic=True)
    lu = torch.compile(lambda x, p: torch.lu_unpack(x * 2, p)[0] + 1, backend="lenz")
    one, square = torch.randn(1, 3, device=device), torch.randn(64, 64, device=device)
    at(table, torch.tensor([1, 2], device=device)), big(one, 5)
    lu(square, torch.arange(1, 65, dtype=torch.int32, device=device))
    failing: list[Callable[[], Any]] = [lambda: big(one, 1 << 50)]
    if device == "cpu":  # a GPU finds out later, and is lost
        failing += [lambda: at(table, wrong), lambda: lu(square, pivots)]
    for k in range(count):
        try:
            failing[k % len(failing)]()
        except (IndexError, RuntimeError):
            yield
        else:
            raise AssertionError(f"call {k} raised nothing")


KINDS: dict[str, Callable[..., Iterator[None]]] = {
    "cycles": cycles, "calls": calls, "raising": raising,
}  # fmt: skip


def work(kind: str, count: int, device: str, *more: str) -> list[dict[str, float]]:
    """Do the work in this process; what it held at 60 times."""
    looks, every = [], max(1, count // LOOKS)
    for k, _ in enumerate(KINDS[kind](count, device, *more)):
        if k % every == every - 1:
            looks.append(look())
    return looks


def apart(kind: str, count: int, device: str, *more: str) -> list[dict[str, float]]:
    """The same in a process of its own."""
    told = json.dumps([kind, count, device, *more])
    command = [sys.executable, "-m", "tests.e2e.leaks", "--work", told]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def faults(found: dict[str, float], usual: float = 0.0) -> list[str]:
    """What has grown by more than it may; `usual` is what resident memory may grow by besides."""
    bounds = {**BOUNDS, "resident KiB": BOUNDS["resident KiB"] + max(0.0, usual)}
    return [
        f"{k} grew by {v:.0f}, allowed {bounds[k]:.0f}" for k, v in found.items() if v > bounds[k]
    ]


def main() -> int:
    """Do all three and print them; the exit code is 1 if something grew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=1_000)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--raising", type=int, default=1_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.work:
        print(json.dumps(work(*json.loads(o.work))))
        return 0
    wrong = 0
    for kind in ("raising", "calls", "cycles"):
        count, start, usual = getattr(o, kind), time.monotonic(), 0.0
        if count == 0:
            continue
        found = growth(looks := apart(kind, count, o.device))
        if kind == "cycles":
            usual = growth(apart(kind, count, o.device, "aot_eager"))["resident KiB"]
        # The last third of the looks is a third of the cycles after the middle one.
        bad = faults(found, BESIDE * usual + LINKED * count / 3 if kind == "cycles" else 0.0)
        wrong += bool(bad)
        told = ", ".join(f"{k} {looks[-1][k]:.0f} ({v:+.0f})" for k, v in found.items())
        beside = f"; resident KiB of aot_eager {usual:+.0f}" if kind == "cycles" else ""
        print(f"{count} {kind}, {time.monotonic() - start:.0f} s: {told}{beside}", flush=True)
        for text in bad:
            print(f"  FAILED: {text}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
