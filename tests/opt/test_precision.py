"""What is compared with a result of its own is one number wherever it is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.frontend.test_split import kept_of
from tests.gpu_oracle import assert_function

HALVES = pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))


def pool(x: Tensor) -> Tensor:
    return x.sin().amax(-1)


def poured(x: Tensor) -> Tensor:
    t = x.tanh().flatten()
    return t.new_zeros(7).scatter_reduce(0, torch.arange(len(t)) % 7, t, "amax")


def limits(x: Tensor) -> Tensor:
    return torch.aminmax(F.softplus(x), dim=0).max


@HALVES
@pytest.mark.parametrize("fn", (pool, poured, limits))
def test_gradients_of_extrema_of_rounded_values(
    fn: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """A wrong number, often NaN: x == amax(x) was false for all x, half of them not rounded."""
    x = (torch.arange(111.0).view(3, 37) * 2.7).sin().to(dtype)
    run = torch.compile(fn, backend="lenz")
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = run(ours), fn(theirs)
    (got,) = torch.autograd.grad(got, ours, torch.ones_like(got))
    (want,) = torch.autograd.grad(want, theirs, torch.ones_like(want))
    torch.testing.assert_close(got, want)


def greatest(x: Tensor) -> Tensor:
    t = x.sin().exp()
    return t == t.amax(-1, keepdim=True)


def selected(x: Tensor) -> Tensor:
    t = x.sin() * 3
    return torch.where(t < t.topk(3).values[:, -1:], -1.0, 1.0)


@HALVES
@pytest.mark.parametrize("fn", (greatest, selected))
def test_comparisons_with_what_was_rounded(
    fn: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """Users' masks of the largest elements are eager's; also in the kernels for a GPU."""
    x = (torch.arange(111.0).view(3, 37) * 2.7).sin().to(dtype)
    assert torch.equal(torch.compile(fn, backend="lenz")(x), fn(x))
    if fn is greatest:  # topk is a call
        assert_function(fn, x)


@HALVES
def test_a_known_number_is_rounded_where_it_is_compared(dtype: torch.dtype) -> None:
    """It was compared with its maximum, which had been stored."""

    def f(x: Tensor) -> Tensor:
        t = torch.hypot(x.fill_(-1), x)
        return (t == t.amax(0, keepdim=True)).any(0).count_nonzero(0)

    x = torch.zeros(7, 4, 4, dtype=dtype)
    assert_function(f, x)
    assert torch.compile(f, backend="lenz")(x).tolist() == [4] * 4


def test_what_is_compared_with_its_own_maximum_is_kept() -> None:
    """Its comparison, or where that is made in the backward half, it."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        t = (x * 1.37).sin()
        return t.relu(), torch.maximum(t, t.amax(-1, keepdim=True))

    kept = [op for op, *_ in kept_of(fn, (8, 16))]
    assert "eq.Tensor" in kept or "sin.default" in kept


@HALVES
def test_a_mean_is_of_the_numbers_that_it_is_taken_from(dtype: torch.dtype) -> None:
    """Sums in f64 read what was rounded, and the distance from them what was not: 0.02 for 0."""

    def f(x: Tensor) -> Tensor:
        t = x.diff(dim=-1)
        return F.batch_norm(t.broadcast_to(2, *t.shape), None, None, training=True, eps=1e-2)

    x = (torch.randn(33, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    assert not torch.compile(f, backend="lenz")(x).any(), "rows that are equal have a variance"
