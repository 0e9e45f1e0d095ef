"""Checks that run on several processes, each a rank of one process group.

A check is a function of its `Rank`.  All checks of one call share the processes, which take longer
to start than most checks to run.  They tell each other through the store how a check has ended:
after a failure, ranks may be out of step, so that what is left is not run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from lenz.process import LOADED

PATIENCE = timedelta(seconds=120)


@dataclass(frozen=True)
class Rank:
    """One process: its number, how many there are, their device, the name of their group."""

    number: int
    size: int
    device: str
    group: str

    def randn(self, *sizes: int, seed: int = 0, same: bool = False) -> torch.Tensor:
        """Random numbers, those of other ranks or the `same`."""
        source = torch.Generator().manual_seed(seed if same else 1000 * seed + self.number + 1)
        return torch.randn(*sizes, generator=source).to(self.device)


Check = Callable[[Rank], object]


def failures(size: int, checks: Sequence[Check], device: str = "cpu") -> str:
    """What went wrong on any rank, as text; empty if nothing did."""
    forks = device == "cpu" and "forkserver" in multiprocessing.get_all_start_methods()
    if forks:  # torch and the checks are imported once for all ranks
        multiprocessing.set_forkserver_preload(
            [*LOADED, "tests.distributed.checks", "tests.frozen"]
        )
    way = "forkserver" if forks else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        args = size, device, folder, checks
        started: Any = torch.multiprocessing.start_processes(
            run, args=args, nprocs=size, join=False, start_method=way
        )
        try:
            while not started.join():
                pass
        except torch.multiprocessing.ProcessExitedException as e:
            return f"a rank died: {e}"
        said = [json.loads((Path(folder) / str(n)).read_text()) for n in range(size)]
    return "\n".join(f"rank {n}: {text}" for n, texts in enumerate(said) for text in texts)


def run(number: int, size: int, device: str, folder: str, checks: Sequence[Check]) -> None:
    """One rank: all checks, up to the first that fails anywhere."""
    os.environ["LENZ_CACHE_DIR"] = str(Path(folder) / f"cache{number}")
    torch.set_num_threads(1)
    place = f"cuda:{number}" if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(number)
    register()
    store = dist.FileStore(str(Path(folder) / "store"), size)
    kind = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(kind, rank=number, world_size=size, store=store, timeout=PATIENCE)
    world: Any = dist.group.WORLD
    rank = Rank(number, size, place, dist.distributed_c10d._world.pg_names[world])
    said: list[str] = []
    for k, check in enumerate(checks):
        torch.manual_seed(k)
        torch._dynamo.reset()
        try:
            check(rank)
            end = "good"
        except Exception:  # noqa: BLE001 - whatever it is, the parent process shows it
            end = "bad"
            said.append(f"{named(check)}: {traceback.format_exc()}")
        store.set(f"{k} {number}", end)
        ends = [store.get(f"{k} {n}") for n in range(size)]
        if any(e != b"good" for e in ends):
            break
    (Path(folder) / str(number)).write_text(json.dumps(said))
    if not said:
        dist.destroy_process_group()
    # Ranks that are out of step would wait for each other at the end.
    os._exit(0) if said else None


def named(check: Any) -> str:
    return getattr(check, "__name__", "") or str(check)


def register() -> None:
    """Make backend="lenz" known where lenz is not installed, only on the path."""
    import lenz

    if "lenz" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(lenz.backend, name="lenz")
