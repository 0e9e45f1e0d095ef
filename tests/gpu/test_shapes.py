"""Sizes and layouts that a grid of thread blocks makes hard: empty, odd, very long, very large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, randn

from tests.e2e.sides import agree

# No dimension but the first of a CUDA grid may be larger than this.
GRID = 65535


def test_empty_tensors(device: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x + 1, x.sum(0), x.sum(), x.t().contiguous(), torch.cat([x, x], 1)

    for shape in ((0, 5), (5, 0), (0, 0)):
        agree(f, lambda shape=shape: [randn(shape, device=device)])  # type: ignore[misc]


@pytest.mark.parametrize("n", (1, 31, 33, 127, 129, 1023, 1025, 4099, 65537, 1048583))
def test_lengths_around_powers_of_two(n: int, device: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (x * 2).relu(), x.sum(), x.amax(), x.argmax(), x.flip(0), x.softmax(0)

    agree(f, lambda: [randn(n, device=device)], tol=1e-4 * max(1.0, n**0.5 / 100))


@pytest.mark.parametrize("shape", ((7, 3), (130, 70), (1, 5000), (5000, 1), (33, 257), (1000, 999)))
def test_reductions_of_every_axis(shape: tuple[int, int], device: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        rows = x.softmax(-1), x.var(-1), x.argmin(-1), (x > 0).any(-1), x.amax(-1, keepdim=True)
        columns = x.sum(0), x.softmax(0), x.argmax(0), x.prod(0), (x * x).mean(0)
        return *rows, *columns, x.sum(), x.t().contiguous() + 1

    agree(f, lambda: [randn(shape, device=device)], tol=1e-3)


@pytest.mark.parametrize("n", (GRID, GRID + 2, 3 * GRID))
def test_more_rows_than_a_dimension_of_a_grid(n: int, device: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.transpose(1, 2).contiguous() + 1, x.sum(-1), x.sum(1), x.permute(2, 0, 1).sum(0)

    agree(f, lambda: [randn(n, 3, 5, device=device)], tol=1e-4)
    agree(lambda x: x.t().contiguous() * 2, lambda: [randn(3, n, device=device)])
    agree(lambda x: x.t().contiguous() * 2, lambda: [randn(n, 3, device=device)])


@pytest.mark.parametrize("dynamic", (False, True))
def test_one_function_at_many_sizes(dynamic: bool, device: str) -> None:
    f = lambda x, y: ((x + y).softmax(-1).t().contiguous(), (x * y).sum(0))
    run = torch.compile(f, backend="lenz", dynamic=dynamic or None)
    for n, m in ((4, 6), (5, 7), (64, 128), (129, 1), (1, 129), (300, 2050)):
        x, y = randn(n, m, device=device), randn(m, device=device)
        torch.testing.assert_close(run(x, y), f(x, y), rtol=1e-4, atol=1e-4)


def test_storage_that_is_not_aligned(device: str) -> None:
    run = torch.compile(lambda x: x.mul_(2), backend="lenz", dynamic=False)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        base = torch.arange(100, device=device).to(dtype)
        for first in (0, 1, 2, 3):
            wanted = base.clone()
            wanted[first : 64 + first] *= 2
            run(base[first : 64 + first])
            assert torch.equal(base, wanted), f"{dtype} from {first}"
            base = torch.arange(100, device=device).to(dtype)


def test_layouts(device: str) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x + y, x.relu(), x.sum(1), x.contiguous() * 2, x.softmax(1)

    def last() -> list[Tensor]:
        x = randn(2, 8, 5, 7, device=device)
        return [x.to(memory_format=torch.channels_last), x]

    turned = lambda: randn(7, 6, 4, device=device).permute(2, 1, 0)
    views: list[Callable[[], list[Tensor]]] = [
        last,
        lambda: [randn(9, 6, device=device).t(), randn(6, 9, device=device)],
        lambda: [randn(9, 12, device=device)[:, ::2], randn(6, device=device).expand(9, 6)],
        lambda: [randn(4, 1, 7, device=device).expand(4, 6, 7), turned()],
    ]
    for make in views:
        agree(f, make, tol=1e-4)


BIG: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: x + 1,
    "sum": lambda x: x.sum(dtype=torch.int64),
    "rows": lambda x: x.view(-1, 1 << 16).sum(1, dtype=torch.int64),
    "columns": lambda x: x.view(-1, 1 << 16).sum(0, dtype=torch.int64),
    "reversed": lambda x: x.flip(0),
}


@pytest.mark.parametrize("name", tuple(BIG))
def test_offsets_beyond_32_bits(name: str, cuda: str) -> None:
    """2^31 + 2^20 elements of one byte: offsets do not fit into 32 bits."""
    x = torch.empty((1 << 31) + (1 << 20), dtype=torch.int8, device=cuda)
    x.random_(-3, 4)
    got = torch.compile(BIG[name], backend="lenz")(x)
    assert torch.equal(got, BIG[name](x))
