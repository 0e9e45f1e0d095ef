"""Writes into parts of large arguments on a GPU: caches of keys and values, custom ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lenz
from tests.e2e.sides import agree

ROWS, WIDTH = 96, 64
Write = Callable[..., Any]


@torch.library.custom_op("lenz_gpu::put_rows", mutates_args=("k", "v"))
def put_rows(k: Tensor, v: Tensor, at: Tensor, new: Tensor) -> None:
    k[:, at] = new
    v[:, at] = new * 2


@torch.library.custom_op("lenz_gpu::grow", mutates_args=("x",))
def grow(x: Tensor, by: float) -> Tensor:
    x += by
    return x.sum(-1)


@grow.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return x.new_empty(x.shape[:-1])


def by_custom_op(k: Tensor, v: Tensor, at: Tensor, new: Tensor) -> Tensor:
    put_rows(k, v, at, new.sin())
    return (k * v).sum(1)


def by_custom_op_twice(k: Tensor, v: Tensor, at: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    put_rows(k, v, at, new)
    put_rows(v, k, at + 3, new + 1)
    return k[:, 2] * 2, grow(v[1:2, 5:9], 0.5)


def by_slice(k: Tensor, v: Tensor, at: Tensor, new: Tensor) -> Tensor:
    k[:, 7:9] = new
    v[:, 7:9].mul_(new.exp())
    return (k[:, :9] @ v[:, :9].mT).softmax(-1)


def by_index(k: Tensor, v: Tensor, at: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    k.index_copy_(1, at, new)
    v[:, at] = new * 3
    return k, v[0] + 1


def by_add(k: Tensor, v: Tensor, at: Tensor, new: Tensor) -> Tensor:
    k.index_add_(1, at, new)
    v[0].add_(1)
    v[1, :, 3:5] = k[1, :, :2]
    return k.amax(1) - v.amin(1)


@pytest.mark.parametrize("mode", ("default", "reduce-overhead"))
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize(
    "f", (by_custom_op, by_custom_op_twice, by_slice, by_index, by_add), ids=lambda f: f.__name__
)
def test_caches(f: Write, dynamic: bool, mode: str, device: str) -> None:
    def make() -> list[Tensor]:
        k, v, new = (torch.randn(4, n, WIDTH, device=device) for n in (ROWS, ROWS, 2))
        return [k, v, torch.tensor([11, 40], device=device), new]

    how: dict[str, Any] = {} if mode == "default" else {"mode": mode}
    agree(f, make, dynamic=dynamic, calls=5, tol=1e-4, **how)


@pytest.mark.parametrize("f", (by_custom_op, by_slice, by_index), ids=lambda f: f.__name__)
def test_a_part_is_written_in_place(f: Write, device: str) -> None:
    """No memory of a cache's size is taken for the call."""
    k, v = (torch.zeros(4, 8 * ROWS, WIDTH, device=device) for _ in "kv")
    at, new = torch.tensor([11, 40], device=device), torch.ones(4, 2, WIDTH, device=device)
    run = torch.compile(f, backend="lenz", fullgraph=True)
    for _ in range(3):
        run(k, v, at, new)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = run(k, v, at, new)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < k.nbytes
        del out
    assert all(g.peak < k.nbytes for g in lenz.explain(f)(k, v, at, new).graphs)
