"""Measured tiles on a real GPU: right results, nothing of the user's touched, the right clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, randn
from torch.nn import functional as F

import lenz
from lenz.machine.cuda.tune.bench import Gpu, measure


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def columns(x: Tensor) -> Tensor:
    return x.float().square().sum(0)


def transposed(x: Tensor) -> Tensor:
    return torch.relu(x.t() + 1).contiguous() * x.t()


def looked_up(x: Tensor) -> Tensor:
    index = torch.arange(0, x.shape[0], 3, device=x.device).flip(0)
    return F.embedding(index, x) * 2


def in_place(x: Tensor) -> Tensor:
    x.mul_(1.5).add_(1)
    return x.sum(-1)


@pytest.mark.parametrize("fn", [softmax, columns, transposed, looked_up, in_place])
def test_tuned_kernels_do_what_eager_does(
    fn: Callable[[Tensor], Tensor], cuda: str, tmp_path: Path
) -> None:
    x = randn(3000, 1000, device=cuda)
    mine, theirs = x.clone(), x.clone()
    state = torch.cuda.get_rng_state()
    options: dict[str, object] = {"autotune": True, "cache_dir": str(tmp_path)}
    first: Any = lenz.explain(fn, options=options)(mine)
    assert torch.equal(state, torch.cuda.get_rng_state()), "the user's random numbers were drawn"
    torch.testing.assert_close(first.result, fn(theirs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine, theirs, msg="an argument was changed by measuring")
    reports = [r for g in first.graphs for r in g.autotune]
    assert reports, "nothing was measured"
    for r in reports:
        times = [t.us for t in r.tried if t.us is not None]
        assert len(times) >= 2, r
        assert r.tried[r.chosen].us is not None and not r.remembered
    again: Any = lenz.explain(fn, options=options)(x.clone())
    repeated = [r for g in again.graphs for r in g.autotune]
    assert [r.remembered for r in repeated] == [True] * len(reports)
    assert [r.chosen for r in repeated] == [r.chosen for r in reports]


def test_the_clock_is_that_of_the_tensors_gpu(cuda: str) -> None:
    number = torch.cuda.device_count() - 1  # not the current one, where there are two
    gpu, before = Gpu(number), torch.cuda.current_device()
    small = torch.empty(1 << 20, dtype=torch.uint8, device=gpu.place)
    large = torch.empty(1 << 30, dtype=torch.uint8, device=gpu.place)
    short = measure(lambda: small.clone(), gpu)
    long = measure(lambda: large.clone(), gpu)
    assert long > 5 * short, (short, long)
    kept = large.clone()
    restored = measure(lambda: small.clone(), gpu, restore=lambda: large.copy_(kept))
    assert restored < long / 5, "what restores the arguments is part of the time"
    assert torch.cuda.current_device() == before
