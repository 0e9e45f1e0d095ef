"""Timed calls of a plan with and without a CUDA graph, for `cuda_graphs="auto"`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypeAlias, TypeVar

import torch

from lenz.records import dataclass, field

TURNS = 3  # timed calls each way: the host's and the GPU's clocks make a single call noisy
# A graph this much slower than launches is not used, unless the loss is less than this part of the
# host time that it saves, which other work may need: GPT-2's halves, timed alone, are as fast by
# launches, but its training step then takes 1.18x as long.
SLOWER, SAVED = 1.02, 0.25

Result = TypeVar("Result", bound=Sequence[Any] | None)
Seconds: TypeAlias = tuple[float, float]  # of a call, and of the host's part of it


@dataclass(slots=True)
class Trial:
    """Times of alternating calls with and without a graph on a GPU: in all, and on the host."""

    gpu: int
    plain: list[Seconds] = field(default_factory=list)
    replayed: list[Seconds] = field(default_factory=list)

    def timed(self, times: list[Seconds], run: Callable[[Any], Result], args: list[Any]) -> Result:
        """The results of a call, whose times are noted; None for a call that a graph rejects."""
        took, results = timed_call(run, args, self.gpu)
        times += [took] if results is not None else []
        return results

    @property
    def is_plains_turn(self) -> bool:
        """Whether the next call is timed without a graph."""
        return len(self.plain) <= len(self.replayed)

    @property
    def is_over(self) -> bool:
        """Whether a further call of each kind could not change which one is faster."""
        count = min(len(self.plain), len(self.replayed))
        return count >= TURNS or (2 * count > TURNS and max(self.replayed)[0] <= min(self.plain)[0])

    @property
    def is_slow(self) -> bool:
        """Whether a replay takes longer than launches and saves too little host time."""
        (replay, on_host), (launches, host) = medians(self.replayed), medians(self.plain)
        return replay > SLOWER * launches and replay - launches > SAVED * (host - on_host)

    def __str__(self) -> str:
        ways = [1e3 * t for way in (self.replayed, self.plain) for t in medians(way)]
        text = "a replay takes {:.3f} ms ({:.3f} on the host), launches {:.3f} ({:.3f})"
        return text.format(*ways)


def medians(times: Sequence[Seconds]) -> Seconds:
    """The median of each of the two times."""
    whole, host = zip(*times, strict=True)
    return median(whole), median(host)


def timed_call(run: Callable[[Any], Result], args: list[Any], gpu: int) -> tuple[Seconds, Result]:
    """The seconds of a call and its results; another thread may capture a stream meanwhile."""
    wait = torch.cuda.current_stream(gpu).synchronize  # of the whole GPU, it would be an error
    wait()
    start = time.perf_counter()
    results = run(args)
    host = time.perf_counter() - start
    wait()
    return (time.perf_counter() - start, host), results
