"""Ranges of torch.profiler for each call of a compiled graph, and for each of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lenz.debug.between import title_of
from lenz.debug.names import titled
from lenz.debug.watch import Tensors, Watch
from lenz.ir.plan import Boxed


class Ranges(Watch):
    """A range of torch.profiler around each launch and call, with the name of the kernel or op."""

    def before(self, k: int, tensors: Tensors, sizes: Sequence[int] = ()) -> None:
        made: Any = torch.profiler.record_function  # torch gives its methods no types
        self.open = made(title_of(self.steps[k]))
        self.open.__enter__()

    def after(self, k: int, tensors: Tensors) -> None:
        self.open.__exit__(None, None, None)


def ranged(run: Boxed, name: str) -> Boxed:
    """`run`, in a range of torch.profiler with the graph's name."""
    title = titled(name)

    def call(args: list[Any]) -> Sequence[Any]:
        with torch.profiler.record_function(title):
            return run(args)

    return call
