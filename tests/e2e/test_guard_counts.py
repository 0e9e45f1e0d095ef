"""Dynamo guards as after aot_eager, as many compilations over lists of sizes, and right results.

One more guard is lenz's: the level of forward-mode differentiation (frontend/levels.py).

`test_guards` compares the conditions on sizes alone; here are those of Dynamo too, and what follows
from both: which sizes share a compilation, sizes 0 and 1 among them, and sizes for which something
does not hold that a first compilation took for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, randn

Fn = Callable[[Tensor], Any]
SIZES = (5, 8, 1, 0, 16, 1000, 2, 3, 7, 64)


def branch(x: Tensor) -> Tensor:
    return x.sin() * 2 if x.shape[0] > 6 else x.cos() - 1


def multiple(x: Tensor) -> Tensor:
    return x.view(-1, 2, 3).sum(1) if x.shape[0] % 2 == 0 else x + 1


def positions(x: Tensor) -> Tensor:
    return x.index_select(0, torch.arange(x.shape[0] - 1, -1, -1)) * 2


CASES: dict[str, Fn] = {
    "elements": lambda x: x * x.shape[0] + 1,
    "rows": lambda x: (x - x.mean(1, keepdim=True)).softmax(1),
    "columns": lambda x: x.sum(0) / (x.shape[0] + 1),
    "product": lambda x: x.T @ x,
    "views": lambda x: x.reshape(-1).view(x.shape[1], x.shape[0]).t() + 1,
    "slices": lambda x: (x[: x.shape[0] // 2] * 2, x[::3] + 1),
    "padding": lambda x: F.pad(x, (1, 2, 0, 3)).cos(),
    "joined": lambda x: torch.cat([x, x[:1], x]).exp(),
    "positions": positions,
    "running": lambda x: x.cumsum(0).sin(),
    "branch": branch,
    "multiple": multiple,
    "in place": lambda x: x.clone().mul_(2).t().add_(x.shape[0]),
}


def seen(fn: Fn, backend: str, sizes: Sequence[int]) -> tuple[list[int], list[list[str]]]:
    """How often was compiled up to each call, and the guards of each compilation."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    found: list[list[str]] = []

    def note(guards: Any) -> None:
        kept = (g for g in guards if g.guard_types != ["DUAL_LEVEL"])
        found.append(sorted(f"{g.name} {g.guard_types} {g.code_list}" for g in kept))

    counts = []
    with torch._dynamo.config.patch(recompile_limit=64):
        run = torch._dynamo.optimize(counter, guard_export_fn=note)(fn)
        for n in sizes:
            x = randn(n, 3)
            torch.testing.assert_close(run(x), fn(x), rtol=1e-4, atol=1e-4)
            counts.append(counter.frame_count)
    return counts, found


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", CASES)
def test_guards_and_compilations_are_those_of_aot_eager(name: str) -> None:
    (theirs, their_guards), (ours, our_guards) = (
        seen(CASES[name], backend, SIZES) for backend in ("aot_eager", "lenz")
    )
    assert theirs[-1] < len(SIZES), "no size shares a compilation"
    assert ours == theirs
    assert len(their_guards) == theirs[-1] and all(their_guards)
    assert our_guards == their_guards


def test_a_condition_more_would_be_seen() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2

    def stricter(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] < 1000 else x + x

    (loose, few), (strict, more) = (seen(f, "aot_eager", SIZES) for f in (fn, stricter))
    assert loose != strict and few != more
