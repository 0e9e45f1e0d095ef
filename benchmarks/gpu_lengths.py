"""CUDA graphs where sizes change: a layer of an encoder on 200 random lengths.

The section `lengths` of `python -m benchmarks.gpu`: milliseconds for all lengths, each in turn,
without graphs, with graphs, and with graphs where they pay; medians of interleaved rounds.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Row, backend_of
from benchmarks.start_cases import Layer

SIDES = ("off", "on", "auto")
WIDTH, LENGTHS, ROUNDS = 256, 200, 7
CASES = {"200 random": True, "200 of 8 buckets": False}


def layer(device: str) -> nn.Module:
    """A layer whose kernels take less than their launches, so that graphs could help.

    torch's own layer is one library call in inference, and has no graph.
    """
    return Layer(WIDTH).to(device)


def lengths(all_new: bool, tiny: bool) -> list[int]:
    """Random lengths: nearly all of them new, or of eight buckets."""
    chosen, count = random.Random(0), 20 if tiny else LENGTHS
    if all_new:
        return [chosen.randrange(16, 64 if tiny else 2048) for _ in range(count)]
    return [(8 if tiny else 128) * chosen.randrange(1, 9) for _ in range(count)]


def milliseconds(run: Callable[[Tensor], Any], inputs: list[Tensor]) -> float:
    """Wall time of a call on each input."""
    sync = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    sync()
    start = time.perf_counter()
    for x in inputs:
        run(x)
    sync()
    return (time.perf_counter() - start) * 1e3


def measure(case: str, tiny: bool, device: str) -> Row:
    """The row of a kind of lengths: medians by the option `cuda_graphs`.

    The first round, which compiles, is dropped.
    """
    model, runs = layer(device), dict[str, Callable[[Tensor], Any]]()
    for how in SIDES:
        options: dict[str, Any] = {"cuda_graphs": how}
        own = copy.deepcopy(model)  # Dynamo keeps one compilation per module
        runs[how] = torch.compile(own, backend=backend_of("lenz"), dynamic=True, options=options)
    inputs = [torch.randn(1, n, WIDTH, device=device) for n in lengths(CASES[case], tiny)]
    seen: dict[str, list[float]] = {how: [] for how in SIDES}
    with torch.no_grad():
        for _ in range(ROUNDS + 1):
            for how, run in runs.items():
                seen[how].append(milliseconds(run, inputs))
    return {"case": case, **{f"{how}_ms": statistics.median(t[1:]) for how, t in seen.items()}}
