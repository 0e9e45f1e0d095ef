"""First calls: a new process for each, with empty caches, and once more with the caches they left.

The clock starts after torch and Dynamo are imported and the model is built, just before
torch.compile is called, and stops when the first result is there.  What a contestant imports for
itself counts.

A worker: `python -m benchmarks.first_call --backend B --case C` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import PEER, Row, agree, caches, child, note

BACKENDS = ("eager", "aot_eager", "lenz", PEER)
Prepared = tuple[Callable[..., Any], tuple[Any, ...]]


def norm_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """layer_norm and gelu over the last axis; one kernel."""
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w, b))


def kernel() -> Prepared:
    return norm_gelu, (torch.randn(64, 256), torch.randn(256), torch.randn(256))


def encoder() -> Prepared:
    """The forward of a 12-layer BERT-like encoder."""
    from benchmarks.models import bert

    example = bert(layers=12, batch=2)
    model = example.model.eval()
    return example.forward, (model, *example.inputs)


CASES: dict[str, Callable[[], Prepared]] = {"kernel": kernel, "encoder": encoder}


def first_call(case: str, backend: str) -> Row:
    """Compile and call once; return the seconds, having checked the result."""
    torch.manual_seed(0)
    fn, args = CASES[case]()
    with torch.no_grad():
        # `eager` is Dynamo alone here, so that what AOTAutograd and the compilers add is seen.
        start = time.perf_counter()
        made = torch.compile(fn, backend=backend, dynamic=False, fullgraph=True)
        got = made(*args)
        seconds = time.perf_counter() - start
        agree(fn(*args), got, 1e-3, 1e-4)
    return {"seconds": seconds}


def measure(case: str, processes: int, backends: Sequence[str] = BACKENDS) -> Row:
    """Return medians of `processes` new processes per backend, cold and warm, interleaved."""
    cold: dict[str, list[float]] = {b: [] for b in backends}
    warm: dict[str, list[float]] = {b: [] for b in backends}
    for turn in range(processes):
        for backend in backends:
            with caches() as env:
                args = ["--case", case, "--backend", backend]
                cold[backend].append(child("first_call", args, env, 2)["seconds"])
                if backend not in ("eager", "aot_eager"):
                    warm[backend].append(child("first_call", args, env, 2)["seconds"])
            again = f" warm {warm[backend][-1]:.2f} s" if warm[backend] else ""
            note(f"first call {case} {turn}: {backend} {cold[backend][-1]:.2f} s{again}")
    made: Row = {"case": case, "processes": processes}
    for b in backends:
        made[f"{b}_s"] = statistics.median(cold[b])
        if warm[b]:
            made[f"{b}_warm_s"] = statistics.median(warm[b])
    return made


def main() -> None:
    """Run one first call and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", choices=tuple(CASES), default="kernel")
    parser.add_argument("--backend", choices=BACKENDS, default="lenz")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(first_call(options.case, options.backend)))


if __name__ == "__main__":
    main()
