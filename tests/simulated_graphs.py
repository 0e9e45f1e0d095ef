"""Plans around CUDA graphs, on a CPU: the steps of a graph run where it would be captured.

What a graph reads, writes, keeps and copies is as on a GPU, so that a name that is missing or
memory that is not the caller's is found here.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lenz import replay
from lenz.ir.plan import BindSize, CallStep, Check, LaunchStep, Step
from lenz.machine.cuda import graph
from lenz.page import explainer  # noqa: F401  # it takes the class that is replaced here
from lenz.plan import regions
from lenz.runtime import executor
from lenz.runtime.captured import Runner
from lenz.runtime.constants import whole_memory


class Simulated(graph._Capture):
    """A capture that runs its steps. As on a GPU, bytes are copied, whatever their type."""

    def launch(self, s: LaunchStep) -> list[int]:
        return Runner.launch(self, s)

    def copy(self, jobs: Any) -> None:
        for _, to, start, _ in jobs:
            whole_memory(to).view(torch.uint8).copy_(whole_memory(start).view(torch.uint8))


def simulate(patch: pytest.MonkeyPatch) -> list[replay.Replayed]:
    """The plans that are compiled from now on, whose graphs are simulated in the first call."""
    found: list[replay.Replayed] = []

    class Noted(replay.Replayed):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

        def linked(self, *args: Any) -> None:
            return None

    def capture(w: Any, like: Any, *where: Any) -> Any:
        run = Simulated(w, like, 0, 0)
        with torch.no_grad():
            run.all()
        return SimpleNamespace(kept=run.results, start=lambda stream: None)

    patch.setattr(replay, "Replayed", Noted)
    patch.setattr(replay, "WARM", 0)
    patch.setattr(replay, "loader_of", lambda device: SimpleNamespace(capture=capture))
    patch.setattr(executor, "stream", lambda gpu: 0)
    patch.setattr(torch.cuda, "device", lambda d: nullcontext())
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(regions, "_device", lambda steps: ("cpu", ""))
    patch.setattr(replay, "gpu_of", lambda g: 0)
    return found


def cut_at_random(patch: pytest.MonkeyPatch, seed: str) -> None:
    """Leave steps outside, as on a GPU, and some kernels; some captures fail."""
    chance, size = random.Random(seed), regions._sizes
    every = chance.choice((1.0, 0.7))
    real = getattr(replay, "loader_of")("cpu").capture  # noqa: B009 - the one of `simulate`

    def capture(*args: Any) -> Any:
        if chance.random() < 0.3:
            raise RuntimeError("operation not permitted when stream is capturing")
        return real(*args)

    patch.setattr(replay, "loader_of", lambda device: SimpleNamespace(capture=capture))

    def refusal(s: Step, facts: regions.CaptureFacts) -> str:
        if isinstance(s, Check | BindSize) or not size(s) <= {*facts.known}:
            return "not here"
        if isinstance(s, CallStep):
            return regions._refused_call(s, facts)
        return "not this one" if isinstance(s, LaunchStep) and chance.random() > every else ""

    patch.setattr(regions, "_refusal", refusal)


def cut(patch: pytest.MonkeyPatch, every: int, calls: bool) -> None:
    """Leave some steps outside: one launch of so many, library calls perhaps, and checks."""
    count = 0

    def refusal(s: Step, *facts: Any) -> str:
        nonlocal count
        count += isinstance(s, LaunchStep | CallStep)
        if isinstance(s, Check) or (calls and isinstance(s, CallStep)):
            return "not here"
        return "not this one" if isinstance(s, LaunchStep) and every and not count % every else ""

    patch.setattr(regions, "_refusal", refusal)
