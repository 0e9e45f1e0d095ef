"""A process group of one process that does its work in `wait`, on what memory holds by then.

It plays several ranks: what another rank would send is made from what this one gives.  A plan that
uses the memory of a collective before the wait is wrong every time, and not just in a race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SEEN: list[str] = []  # the collectives that were started and waited for, in order
GROUP: Any = getattr(dist, "ProcessGroup", object)
WORK: Any = getattr(dist, "_Work", object)


class Later(WORK):
    """A collective that is under way; `act` is all of it."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        super().__init__()
        self.name, self.act, self.is_done = name, act, False

    def wait(self, timeout: object = None) -> bool:
        if not self.is_done:
            SEEN.append(f"wait for {self.name}")
            self.is_done = True
            self.act()
        return True


def start(name: str, act: Callable[[], object]) -> Later:
    SEEN.append(name)
    return Later(name, act)


class LateGroup(GROUP):
    """The collectives that torch lets Python define, under the names of torch 2.11 and 2.13."""

    def getBackendName(self) -> str:
        return "late"

    def others(self, x: Tensor) -> list[Tensor]:
        """What the other ranks have in place of x."""
        return [x * (k + 2) for k in range(self.size() - 1)]

    def allreduce(self, xs: Sequence[Tensor], options: object = None) -> Later:
        return start("all_reduce", lambda: [x.copy_(sum(self.others(x), x)) for x in xs])

    def allreduce_coalesced(self, xs: Sequence[Tensor], options: object = None) -> Later:
        return start("all_reduce_coalesced", lambda: [x.copy_(sum(self.others(x), x)) for x in xs])

    def broadcast(self, xs: Sequence[Tensor], options: object = None) -> Later:
        return start("broadcast", lambda: [x.copy_(self.others(x)[-1]) for x in xs])

    def all_gather_single_coalesced(
        self, outs: Sequence[Tensor], xs: Sequence[Tensor], options: object = None
    ) -> Later:
        def act() -> None:
            for out, x in zip(outs, xs, strict=True):
                out.copy_(torch.cat([x, *self.others(x)]))

        return start("all_gather_coalesced", act)

    def reduce_scatter_single_coalesced(
        self, outs: Sequence[Tensor], xs: Sequence[Tensor], options: object = None
    ) -> Later:
        def act() -> None:
            for out, x in zip(outs, xs, strict=True):
                own = x[: out.shape[0]]
                out.copy_(sum(self.others(own), own))

        return start("reduce_scatter_coalesced", act)

    def all_to_all_single(self, out: Tensor, x: Tensor, *rest: object) -> Later:
        def act() -> None:
            parts = x.chunk(self.size())
            out.copy_(torch.cat([p * (k + 1) for k, p in enumerate(parts)]))

        return start("all_to_all", act)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def made(store: object, rank: int, size: int, timeout: object) -> LateGroup:
    return LateGroup(rank, size)


@contextmanager
def late_group(size: int = 2) -> Iterator[str]:
    """A default group of this kind; gives its name."""
    if not hasattr(dist.Backend, "LATE"):
        dist.Backend.register_backend("late", made, devices=["cpu"])
    dist.init_process_group("late", rank=0, world_size=size, store=dist.HashStore())
    try:
        yield dist.distributed_c10d._world.pg_names[dist.group.WORLD]  # type: ignore[index]
    finally:
        dist.destroy_process_group()
