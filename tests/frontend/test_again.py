"""Values that a backward pass computes again, when no size is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn

Function = Callable[[Tensor, Tensor, Tensor], Tensor]

# Each norm is followed by ops that the backward half would rather compute again than save.
FUNCTIONS: dict[str, Function] = {
    "group_norm": lambda x, w, b: F.group_norm(x.flatten(2), 2, w, b).cumsum(1),
    "group_norm_of_one": lambda x, w, b: F.group_norm(x, 1).tanh().square(),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, True).tanh().square(),
    "instance_norm": lambda x, w, b: F.instance_norm(x, weight=w, bias=b).tanh().square(),
    "layer_norm": lambda x, w, b: F.layer_norm(x, x.shape[-1:]).tanh().square(),
    "rms_norm": lambda x, w, b: F.rms_norm(x, x.shape[-1:]).tanh().square(),
    "attention": lambda x, w, b: F.scaled_dot_product_attention(
        x, x[:, :2], x[:, :2], enable_gqa=True
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradients_where_all_sizes_are_symbols(function: Function) -> None:
    """Channels of arguments are symbols as well, unlike those of a model's parameters."""
    run = torch.compile(function, backend="lenz", dynamic=True, options={"on_error": "raise"})
    for sizes in ((8, 8, 32, 32), (16, 64, 32, 32)):
        x, w, b = randn(sizes), randn(sizes[1]), randn(sizes[1])
        mine, theirs = ([t.clone().requires_grad_() for t in (x, w, b)] for _ in range(2))
        got, want = run(*mine), function(*theirs)
        torch.testing.assert_close(got, want)
        given = torch.randn_like(want)
        got.backward(given)
        want.backward(given)
        for a, e in zip(mine, theirs, strict=True):
            if e.grad is not None:
                torch.testing.assert_close(a.grad, e.grad, rtol=1e-3, atol=2e-3)


def test_a_converted_norm_of_unknown_sizes() -> None:
    """A view between the norm and the conversion has sizes of the graph among its arguments."""

    def f(x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
        y = F.layer_norm(x.float(), x.shape[-1:], norm, norm)
        return y.view(x.shape[0] * x.shape[1], x.shape[2]).bfloat16() @ w

    run = torch.compile(f, backend="lenz", dynamic=True, options={"on_error": "raise"})
    for sizes in ((64, 64, 64), (32, 96, 128)):
        x, w = randn(sizes).bfloat16(), randn(sizes[2], 32).bfloat16()
        mine, theirs = (
            [t.clone().requires_grad_() for t in (x, w, torch.ones(sizes[2]))] for _ in range(2)
        )
        for function, leaves in ((run, mine), (f, theirs)):
            function(*leaves).float().square().mean().backward()
        for a, e in zip(mine, theirs, strict=True):
            assert a.grad is not None and e.grad is not None
            torch.testing.assert_close(a.grad, e.grad, rtol=2e-2, atol=1e-3)
