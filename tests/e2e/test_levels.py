"""Tensors that hold more than their memory: tangents, and batches of torch's old vmap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian

from tests.e2e.test_warm import folder, fresh, same, traced

__all__ = ["folder", "traced"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")


def tangent(run: Callable[[Tensor], Tensor]) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.arange(3.0), torch.ones(3))
        return forward_ad.unpack_dual(run(dual)).tangent


@pytest.mark.parametrize("is_compiled", [False, True])
def test_tangents_are_eagers(is_compiled: bool) -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda x: x.sin() * 2, backend="lenz")
    x = torch.arange(3.0)
    if is_compiled:
        run(x)
    same(tangent(run), x.cos() * 2)
    same(jacobian(run, x, vectorize=True, strategy="forward-mode"), torch.diag(x.cos() * 2))
    same(run(x), x.sin() * 2)


def test_a_graph_is_compiled_again_outside_the_level(traced: list[int], folder: str) -> None:
    run = fresh(lambda x: x.sin(), folder)
    tangent(run)
    assert not traced
    run(torch.ones(3))
    assert traced


def test_gradients_of_a_batch(folder: str) -> None:
    linear, x = nn.Linear(2, 3), torch.randn(2, requires_grad=True)
    want = jacobian(lambda x: linear(x).tanh(), x)
    for _ in range(2):  # the second time from the cache
        run = fresh(lambda x: linear(x).tanh(), folder)
        (got,) = torch.autograd.grad(run(x), x, torch.eye(3), is_grads_batched=True)
        same(got, want)
        same(jacobian(run, x, vectorize=True), want)
        same(torch.autograd.grad(run(x).sum(), x)[0], want.sum(0))
