"""CUDA graphs where sizes change: a layer of an encoder on 200 random lengths.

python -m benchmarks.gpu_lengths

Prints a table: milliseconds for all lengths, each in turn, without graphs, with graphs, and with
graphs where they pay; medians of rounds that are interleaved.
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

from benchmarks.gpu_measure import gpu_machine

SIDES = ("off", "on", "auto")
WIDTH, LENGTHS, ROUNDS = 256, 200, 7


def layer() -> nn.Module:
    """A layer whose kernels take less than their launches, so that graphs could help."""
    made = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return made.cuda().eval()


def lengths(all_new: bool) -> list[int]:
    """Random lengths: nearly all of them new, or of eight buckets."""
    chosen = random.Random(0)
    if all_new:
        return [chosen.randrange(16, 2048) for _ in range(LENGTHS)]
    return [128 * chosen.randrange(1, 9) for _ in range(LENGTHS)]


def milliseconds(run: Callable[[Tensor], Any], inputs: list[Tensor]) -> float:
    """Wall time of a call on each input."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for x in inputs:
        run(x)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measured(model: nn.Module, all_new: bool) -> dict[str, float]:
    """Medians by the option `cuda_graphs`. The first round, which compiles, is dropped."""
    runs: dict[str, Callable[[Tensor], Any]] = {}
    for how in SIDES:
        options: dict[str, Any] = {"cuda_graphs": how}
        own = copy.deepcopy(model)  # Dynamo keeps one compilation per module
        runs[how] = torch.compile(own, backend="lenz", dynamic=True, options=options)
    inputs = [torch.randn(1, n, WIDTH, device="cuda") for n in lengths(all_new)]
    seen: dict[str, list[float]] = {how: [] for how in SIDES}
    for _ in range(ROUNDS + 1):
        for how, run in runs.items():
            seen[how].append(milliseconds(run, inputs))
    return {how: statistics.median(times[1:]) for how, times in seen.items()}


def main() -> None:
    """Print the table."""
    model = layer()
    print(f"Measured on {gpu_machine('cuda')}")
    print("\n| lengths | off, ms | on, ms | auto, ms | on / off | auto / off |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with torch.no_grad():
        for name, all_new in (("200 random", True), ("200 of 8 buckets", False)):
            ms = measured(model, all_new)
            ratios = [f"{ms[how] / ms['off']:.3f}" for how in SIDES[1:]]
            print("|", " | ".join([name, *(f"{ms[h]:.2f}" for h in SIDES), *ratios]), "|")


if __name__ == "__main__":
    main()
