"""Host cost of one compiled call that launches one tiny kernel, in microseconds.

Batches of 200 calls, short enough to fit between two turns of a busy scheduler.  The figure of a
contestant is its least batch (the host's own work has no reason to be slower than its best);
batches are interleaved.  `aot_eager` costs Dynamo's guards, AOTAutograd's wrapper and one eager op;
what a compiler adds or saves stands against that.

A worker: `python -m benchmarks.host --threads N` prints its rows as one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import PEER, Call, Row, agree, compiled, note

BACKENDS = ("eager", "aot_eager", "lenz", PEER)
BATCH = 200


def one_op(x: Tensor) -> Tensor:
    """One eager op, one kernel."""
    return torch.relu(x)


def five_ops(x: Tensor) -> Tensor:
    """Five eager ops, still one kernel."""
    return torch.relu((x * 2.0 + 1.0) * x - 3.0)


def batch(call: Call) -> float:
    """Return microseconds per call, over one batch."""
    start = time.perf_counter_ns()
    for _ in range(BATCH):
        call()
    return (time.perf_counter_ns() - start) / BATCH / 1e3


def measure(fn: Callable[[Tensor], Tensor], batches: int) -> Row:
    """Return the row of one function."""
    torch._dynamo.reset()
    x = torch.randn(64)
    calls: dict[str, Call] = {}
    took: dict[str, list[float]] = {n: [] for n in BACKENDS}
    # Compiled inside as well: Dynamo guards on the mode and would keep two entries to look through.
    with torch.no_grad():
        for name in BACKENDS:
            f = compiled(fn, name)
            agree(fn(x), f(x), 1e-6, 1e-6)
            calls[name] = lambda f=f: f(x)  # type: ignore[misc]
        for call in calls.values():
            batch(call)
        gc.collect()
        gc.disable()
        for _ in range(batches):
            for name, call in calls.items():
                took[name].append(batch(call))
        gc.enable()
    made: Row = {"fn": fn.__name__, "threads": torch.get_num_threads(), "rounds": batches}
    for name, t in took.items():
        made[f"{name}_us"] = min(t)
        made[f"{name}_median_us"] = statistics.median(t)
    made["lenz above aot_eager"] = made["lenz_us"] - made["aot_eager_us"]
    made["peer above aot_eager"] = made[f"{PEER}_us"] - made["aot_eager_us"]
    note(
        f"{fn.__name__:9} {made['threads']} thr  "
        + "  ".join(f"{n} {made[f'{n}_us']:.2f}" for n in BACKENDS)
        + f" us   lenz above aot_eager {made['lenz above aot_eager']:+.2f}"
    )
    return made


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batches = 100 if options.quick else 500
    print(json.dumps([measure(fn, batches) for fn in (one_op, five_ops)]))


if __name__ == "__main__":
    main()
