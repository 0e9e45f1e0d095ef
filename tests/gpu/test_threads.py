"""Threads that run and train at once, on shared and own streams, with CUDA graphs."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

THREADS, CALLS = 6, 120
SIZES = (16, 24, 32, 64)

Fn = Callable[[Tensor], tuple[Tensor, ...]]


def functions() -> list[Fn]:
    """Kernels and library calls with views, convolutions, and attention whose seeds move."""
    w = randn(32, 32, device="cuda") / 6
    conv = nn.Sequential(
        nn.Conv1d(32, 32, 3, padding=1), nn.GELU(), nn.Conv1d(32, 32, 3, padding=1)
    ).cuda()

    def attention(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (t.view(1, -1, 4, 8).transpose(1, 2) for t in (x @ w, x, x.cos()))
        y = F.scaled_dot_product_attention(q, k, v)  # f32: torch's efficient kernel
        return (y.transpose(1, 2).reshape(x.shape) @ w,)

    def views(x: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).exp().clamp(max=9)
        z = y @ w
        return y, z.t(), (z + x).cumsum(0)

    return [
        lambda x: (torch.softmax((x @ w).sin() + x, -1) @ w,),
        lambda x: (conv(x.t()[None]).mean(-1) * 2 + x.sum(),),
        views,
        attention,
    ]


def results(f: Any, x: Tensor) -> list[Tensor]:
    """The results of a function, and the gradient of its argument if it wants one."""
    made = list(f(x))
    if x.requires_grad:
        made += torch.autograd.grad(sum(t.square().sum() for t in made), x)
    return made


@pytest.mark.parametrize("how", ["on", "auto"])
def test_threads_that_run_and_train(how: str, cuda: str) -> None:
    """Results are eager's, and stay what they were while graphs are made, replayed and dropped."""
    fns = functions()
    options: Any = {"cuda_graphs": how, "cache": False}
    runs = [
        [torch.compile(f, backend="lenz", dynamic=d, options=options) for d in (None, True)]
        for f in fns
    ]

    def work(seed: int) -> None:
        draw = random.Random(seed)
        streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        kept: list[tuple[Tensor, Tensor]] = []
        for _ in range(CALLS):
            n = draw.randrange(len(fns))
            with torch.cuda.stream(draw.choice(streams)):
                train = draw.random() < 0.4
                x = randn(draw.choice(SIZES), 32, device="cuda", requires_grad=train)
                got = results(draw.choice(runs[n]), x)
                for a, b in zip(got, results(fns[n], x), strict=True):
                    assert (a - b).abs().max() <= 0.03 * b.abs().max() + 1e-3, (n, x.shape, train)
                kept += [(t.detach(), t.detach().clone()) for t in got]
                torch.cuda.current_stream().synchronize()
            if draw.random() < 0.05:
                assert all(torch.equal(a, b) for a, b in kept), "a later call changed a result"
                kept.clear()
                gc.collect()
                torch.cuda.empty_cache()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
