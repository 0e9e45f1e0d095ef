"""Host cost of one compiled call that launches one tiny kernel, ten, or ten library calls, in us.

Batches of 200 calls, short enough to fit between two turns of a busy scheduler.  The figure of a
contestant is its least batch (the host's own work has no reason to be slower than its best);
batches are interleaved.  `aot_eager` costs Dynamo's guards, AOTAutograd's wrapper and eager ops;
what a compiler adds or saves stands against that.  `lenz_python` is lenz without native plans.

A worker: `python -m benchmarks.host --threads N [--device cuda]` prints its rows as one line of
JSON.  On a GPU a batch ends when its last launch is queued; two more contestants are lenz with CUDA
graphs, and a backend whose function does nothing, which leaves Dynamo's guards.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import lenz
from benchmarks.measure import (
    GUARDS,
    LENZ_GRAPHS,
    PEER,
    Call,
    Row,
    agree,
    backend_of,
    compiled,
    fresh,
    note,
    said,
)

PYTHON = "lenz_python"
BACKENDS = ("eager", "aot_eager", "lenz", PYTHON, PEER)
GPU_BACKENDS = (*BACKENDS[:3], LENZ_GRAPHS, PYTHON, PEER, GUARDS)
BATCH = 200


def one_op(x: Tensor) -> Tensor:
    """One eager op, one kernel."""
    return torch.relu(x)


def five_ops(x: Tensor) -> Tensor:
    """Five eager ops, still one kernel."""
    return torch.relu((x * 2.0 + 1.0) * x - 3.0)


def ten_kernels(x: Tensor) -> Tensor:
    """Sums over rows and columns in turn, of which none can be part of another one's kernel."""
    for k in range(10):
        x = x.sum(k % 2, keepdim=True).tanh() * x
    return x


def ten_products(x: Tensor) -> Tensor:
    """Ten matrix products, nine of them with a kernel behind them."""
    for _ in range(9):
        x = torch.tanh(x @ x)
    return x @ x


def ten_convolutions(x: Tensor) -> Tensor:
    """Ten convolutions, nine of them with a kernel behind them."""
    w = x[None, None, :3, :3]
    y = x[None, None]
    for _ in range(9):
        y = F.conv2d(y, w, padding=1).tanh()
    return F.conv2d(y, w, padding=1)


def ten_attentions(x: Tensor) -> Tensor:
    """Ten attentions, nine of them with a kernel behind them."""
    y = x[None, None]
    for _ in range(9):
        y = F.scaled_dot_product_attention(y, y, y).tanh()
    return F.scaled_dot_product_attention(y, y, y)


FUNCTIONS = (one_op, five_ops, ten_kernels, ten_products, ten_convolutions, ten_attentions)


def behind(fn: Callable[[Tensor], Tensor], name: str) -> Callable[[Tensor], Tensor]:
    """`fn` compiled by a contestant."""
    if name == GUARDS:
        nothing = lambda gm, inputs: lambda *args: args[:1]
        return torch.compile(fresh(fn), backend=nothing, dynamic=False, fullgraph=True)  # type: ignore[no-any-return]
    if name not in (PYTHON, LENZ_GRAPHS):
        return compiled(fn, name)  # type: ignore[no-any-return]
    how: dict[str, Any] = {"native": False} if name == PYTHON else {"cuda_graphs": "on"}
    own: dict[str, Any] = {"backend": backend_of("lenz"), "options": how}
    return torch.compile(fresh(fn), dynamic=False, fullgraph=True, **own)  # type: ignore[no-any-return]


def batch(call: Call) -> float:
    """Return microseconds per call, over one batch."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(BATCH):
        call()
    return (time.perf_counter_ns() - start) / BATCH / 1e3


def measure(fn: Callable[[Tensor], Tensor], batches: int, device: str = "cpu") -> Row:
    """Return the row of one function; a contestant that fails leaves its error in it."""
    torch._dynamo.reset()
    x = torch.randn(8, 8, device=device)
    graph = lenz.explain(fn)(x).graphs[0]
    made: Row = {"fn": fn.__name__, "threads": torch.get_num_threads(), "rounds": batches}
    made |= {"device": device, "kernels": len(graph.kernels), "calls": len(graph.externs)}
    calls: dict[str, Call] = {}
    # Compiled inside as well: Dynamo guards on the mode and would keep two entries to look through.
    with torch.no_grad():
        for name in BACKENDS if device == "cpu" else GPU_BACKENDS:
            f = behind(fn, name)
            try:
                if name != GUARDS:
                    agree(fn(x), f(x), 1e-5, 1e-5)
                for _ in range(BATCH):
                    f(x)
            except Exception as e:  # noqa: BLE001 - one that fails must not hide the others
                made[f"{name}_failed"] = said(e)
                continue
            calls[name] = lambda f=f: f(x)  # type: ignore[misc]
        took: dict[str, list[float]] = {n: [] for n in calls}
        gc.collect()
        gc.disable()
        for _ in range(batches):
            for name, call in calls.items():
                took[name].append(batch(call))
        gc.enable()
    for name, t in took.items():
        made[f"{name}_us"] = min(t)
        made[f"{name}_median_us"] = statistics.median(t)
    for name, who in (("lenz", "lenz"), ("peer", PEER)):
        if {who, "aot_eager"} <= took.keys():
            made[f"{name} above aot_eager"] = made[f"{who}_us"] - made["aot_eager_us"]
    shown = "  ".join(f"{n} {made[f'{n}_us']:.2f}" for n in took)
    above = made.get("lenz above aot_eager", math.nan)
    launches = f"{made['kernels']}+{made['calls']}"
    note(f"{fn.__name__:16} {launches}  {shown} us   lenz above aot_eager {above:+.2f}")
    return made


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batches = 20 if options.quick else 200
    print(json.dumps([measure(fn, batches, options.device) for fn in FUNCTIONS]))


if __name__ == "__main__":
    main()
