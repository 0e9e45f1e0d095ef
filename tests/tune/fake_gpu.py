"""A GPU in memory: what a launch takes is given, what was asked of it is noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lenz.ir.binary import Binary
from lenz.machine.cuda.tune.bench import Gpu

FLUSH_US, LAUNCH_US = 60.0, 3.0


class FakeGpu(Gpu):
    """A GPU whose clock is a sum.

    took     microseconds of a launch, from the kernel's binary; may raise what the driver raises
    calls    what was asked, in order
    broken   nothing works any more
    """

    name, arch = "Fake GPU", 90
    place = torch.device("cpu")

    def __init__(self, took: Callable[[Binary], float] = lambda _: 10.0) -> None:
        self.took = took
        self.calls: list[str] = []
        self.clock = 0.0
        self.broken = False
        self.arguments: list[tuple[int, ...]] = []

    def spend(self, us: float) -> None:
        self.clock += us

    @contextmanager
    def current(self) -> Iterator[None]:
        self.calls.append("enter")
        try:
            yield
        finally:
            self.calls.append("exit")

    def sync(self) -> None:
        self.calls.append("sync")
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")

    def flush(self) -> None:
        self.calls.append("flush")
        self.spend(FLUSH_US)

    def mark(self) -> float:
        self.calls.append("mark")
        return self.clock

    def us(self, start: Any, end: Any) -> float:
        return float(end - start)

    def now(self) -> float:
        return self.clock * 1e-6

    def load(self, b: Binary, pointers: int, sizes: int) -> Callable[..., None]:
        self.calls.append("load")

        def launch(programs: int, *args: int) -> None:
            assert len(args) == pointers + sizes
            self.arguments.append((programs, *args))
            self.calls.append("launch")
            self.spend(self.took(b))

        return launch

    def count(self, call: str) -> int:
        """How often something was asked."""
        return self.calls.count(call)
