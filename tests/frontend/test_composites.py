"""Ops that torch decomposes before autograd give what eager gives, shared memory too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lenz import explain

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "with no chance": lambda x: F.dropout(x, 0.0),
    "of nothing": lambda x: F.dropout(x[:0], 0.5),
    "of a view": lambda x: F.dropout(x.mT, 0.5, training=False),
    "in a module": torch.nn.Dropout(0.5).eval(),
    "with all chance": lambda x: F.dropout(x, 1.0),
}


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("way", WAYS)
def test_dropout_that_drops_nothing_gives_its_argument(way: str, grad: bool) -> None:
    fn, x = WAYS[way], torch.randn(3, 4, requires_grad=grad)
    got, want = torch.compile(fn, backend="lenz")(x), fn(x)
    torch.testing.assert_close(got, want)
    assert (got is x) == (want is x)
    assert got.stride() == want.stride()
    address = x.untyped_storage().data_ptr()
    shared = [t.untyped_storage().data_ptr() == address for t in (got, want)]
    assert shared[0] == shared[1]


@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
@pytest.mark.parametrize("shape", ((4, 5), (5,), (3, 1)))
def test_a_margin_loss_ends_with_the_labels(shape: tuple[int, ...], reduction: str) -> None:
    target = torch.stack([torch.randperm(shape[-1]) for _ in range(4)])
    for k, row in enumerate(target):
        row[k : k + 1] = -1
    target = target[1] if len(shape) == 1 else target[: shape[0]]
    x = torch.randn(shape, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return F.multilabel_margin_loss(x, target, reduction=reduction)

    got, want = torch.compile(fn, backend="lenz")(x), fn(x)
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (got, want)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shape", ((4, 5), (5,)))
def test_a_margin_loss_of_a_vector_is_a_scalar(shape: tuple[int, ...]) -> None:
    target = torch.randint(0, 5, shape[:-1])
    x = torch.randn(shape, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return F.multi_margin_loss(x, target, p=2, margin=0.7, reduction="none")

    got, want = torch.compile(fn, backend="lenz")(x), fn(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*[torch.autograd.grad(y.sum(), x)[0] for y in (got, want)])


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("pads", ((2, 3), (0, 5), (1, 0, 4, 2), (-1, 3)), ids=str)
def test_a_circular_pad_is_joins(pads: tuple[int, ...], dynamic: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.pad(x, pads, mode="circular")

    rank = 2 + len(pads) // 2
    x = torch.randn((2, 3, 4, 5)[4 - rank :], requires_grad=True)
    if rank == 4:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    run = torch.compile(fn, backend="lenz", dynamic=dynamic)
    got, want = run(x), fn(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert got.stride() == want.stride(), "eager's is contiguous, whatever its argument"
    weights = torch.randn_like(want)
    gradients = [torch.autograd.grad(y, x, weights)[0] for y in (got, want)]
    torch.testing.assert_close(*gradients)
    steps = explain(fn, dynamic=False)(x.detach()).launches
    assert min(pads) < 0 or len(steps) <= rank - 2 + (rank == 4), "torch has a kernel per part"
