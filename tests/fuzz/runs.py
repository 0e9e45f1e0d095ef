"""Other ways to call a program than once: from several threads, and as steps of training."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.fuzz.compare import Outcome, outcome, same
from tests.fuzz.program import Program

__all__ = ["CALLS", "STEPS", "THREADS", "agree_on_steps", "some_options", "steps", "threaded"]

THREADS, CALLS, STEPS = 4, 3, 2
OPTIMIZERS: tuple[Callable[[list[Any]], torch.optim.Optimizer], ...] = (
    lambda leaves: torch.optim.SGD(leaves, lr=0.01),
    lambda leaves: torch.optim.SGD(leaves, lr=0.01, momentum=0.9, weight_decay=0.1),
    lambda leaves: torch.optim.Adam(leaves, lr=0.01, eps=0.1),
    lambda leaves: torch.optim.AdamW(leaves, lr=0.01, eps=0.1, amsgrad=True),
    lambda leaves: torch.optim.Adagrad(leaves, lr=0.01, eps=0.1),
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("fuse", "fuse_reductions", "inline", "horizontal"), (True, True, False)),
    **dict.fromkeys(("reuse_buffers", "aligned", "size_facts", "native"), (True, True, False)),
    **dict.fromkeys(("emulate_rounding", "compare_eager"), (True, False, False)),
    "side_by_side": (32, 8, 3, 1),
    "fuel": (-1, -1, 0, 3, 20),
    "memory_budget": (None, None, 0.2, 0.6, 1, 100, 10_000),
    "ranges": ("off", "off", "calls", "kernels"),
    "cache": (True, False),
    "cuda_graphs": ("off", "on", "auto"),
    "debug": (True, False, False, False),
    "debug_values": (None, None, None, "save"),
    "profile": (False, False, False, True),
}


def some_options(p: Program, folder: str) -> dict[str, Any]:
    """Options by chance, by the tag of a program; a cache in `folder`, or none."""
    chance = random.Random(p.tag)
    return {name: chance.choice(values) for name, values in OPTIONS.items()} | {
        "cache_dir": folder, "debug_dir": folder, "profile_output": f"{folder}/profile.json",
        "verify": True, "on_error": "raise",
    }  # fmt: skip


def threaded(
    p: Program, fn: Callable[..., Any], count: int, device: str = "cpu", each: int = CALLS
) -> list[tuple[int, Outcome]]:
    """What several threads get that call one function at once, also the first time.

    Each outcome has beside it whether it is of the second arguments. On a GPU each thread has a
    stream of its own.
    """

    def calls(number: int) -> list[tuple[int, Outcome]]:
        ks = [(number + k) % count for k in range(each)]
        with torch.cuda.stream(None if device == "cpu" else torch.cuda.Stream()):
            found = [(k, outcome(p, fn, p.arguments(device, second=bool(k)))) for k in ks]
        if device != "cpu":
            torch.cuda.synchronize()
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        return [x for found in pool.map(calls, range(THREADS)) for x in found]


def steps(
    p: Program, compiled: Callable[..., Any], double: bool = False, device: str = "cpu",
    count: int = STEPS,
) -> dict[str, Any]:  # fmt: skip
    """Losses and arguments of a few steps of training, which `compiled` makes of a function."""
    f = p.function(double)
    args = p.arguments(device, double=double)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    optimizer = random.Random(p.tag).choice(OPTIMIZERS)(leaves)

    def step(*args: Any) -> torch.Tensor:
        optimizer.zero_grad()
        outs = [x for x in f(*args) if isinstance(x, torch.Tensor) and x.requires_grad]
        loss = sum([x.mean() for x in outs if x.numel()], torch.zeros((), device=device))
        loss.backward()
        optimizer.step()
        return loss.detach()

    run, found = compiled(step), {}
    for k in range(count):
        found[f"loss {k}"] = run(*args)
        for n, a in zip(p.specs, args, strict=True):
            found[f"{n.name} after step {k}"] = a.detach().clone() if n.dtype is not None else a
    return found


def agree_on_steps(
    got: dict[str, Any], want: dict[str, Any], ideal: dict[str, Any], unit: float
) -> None:
    """Assert that steps are eager's, within what rounding explains; `unit` is as in `same`."""
    for name, y in want.items():
        try:
            same(got[name], y, ideal.get(name), False, unit)
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from None
