"""Gradients that need the values that arguments had before the function overwrote them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn

from tests.cuda import Fake, cuda_programs

Function = Callable[[Tensor, Tensor], Tensor]


def converted(x: Tensor, b: Tensor) -> Tensor:
    y = (b.float() * x).sum()
    b.add_(1)
    return y


def normalised(x: Tensor, b: Tensor) -> Tensor:
    w = torch.ones(64)
    y = F.layer_norm(b.float() * x, (64,), w, w)
    b.mul_(3)
    return y.tanh().sum()


def normalised_by_columns(x: Tensor, b: Tensor) -> Tensor:
    w = torch.ones(64)
    y = F.batch_norm(b.float() * x, None, None, w, w, training=True)
    b.mul_(3)
    return y.tanh().sum()


def of_a_part(x: Tensor, b: Tensor) -> Tensor:
    y = (b[:, :32].float().exp() * x[:, :32]).sum()
    b.add_(1)
    return y


def of_a_transposed_one(x: Tensor, b: Tensor) -> Tensor:
    y = (x.tanh() * b.t().float().t()).sum()
    b[3:9].zero_()
    return y


def of_two_parts(x: Tensor, b: Tensor) -> Tensor:
    u, v = b.float().chunk(2, 1)
    p, q = b.chunk(2, 1)
    y = (x[:, :32] * u * q.float()).sum() + (v.exp() * x[:, 32:] * p.float()).sum()
    b.sub_(2)
    return y


def chosen(x: Tensor, b: Tensor) -> Tensor:
    y = torch.where(b > 0, x, x * 2).sum()
    b.neg_()
    return y


def looked_up(x: Tensor, b: Tensor) -> Tensor:
    y = F.embedding(b[:, 0].abs().long().clamp(max=63), x).square().sum()
    b.zero_()
    return y


def not_at_all(x: Tensor, b: Tensor) -> Tensor:
    """The gradient needs no value of b."""
    y = (x + b.float()).sum()
    b.add_(1)
    return y


FUNCTIONS: tuple[Function, ...] = (
    converted, normalised, normalised_by_columns, of_a_part, of_a_transposed_one, of_two_parts,
    chosen, looked_up, not_at_all,
)  # fmt: skip


def both(f: Function, made: Callable[[], Tensor], **options: Any) -> None:
    """Compare result, gradient and what is left in b with eager."""
    found = []
    for run in (f, torch.compile(f, backend="lenz", **options)):
        torch.manual_seed(0)
        x, b = randn(2048, 64, requires_grad=True), made()
        y = run(x, b)
        y.backward()
        found.append((y.detach(), x.grad, b))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def made() -> Tensor:
    return randn(2048, 64).bfloat16()


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_read_the_old_values(f: Function, dynamic: bool) -> None:
    both(f, made, dynamic=dynamic, options={"on_error": "raise"})


def test_arguments_with_gaps_are_left_to_eager() -> None:
    with pytest.warns(UserWarning, match="overwritten argument that is not dense"):
        both(converted, lambda: randn(2048, 100).bfloat16()[:, :64])


def test_the_start_of_an_argument_may_be_inside_of_its_storage() -> None:
    both(converted, lambda: randn(2050, 64).bfloat16()[2:], options={"on_error": "raise"})


def test_a_parameter_may_be_scaled_behind_its_use() -> None:
    def f(x: Tensor, b: Tensor) -> Tensor:
        y = (x * scale.float()).sum()
        with torch.no_grad():
            scale.mul_(0.5)
        return y + b.float().sum()

    scale = torch.nn.Parameter(torch.full((64,), 2.0, dtype=torch.bfloat16))
    x = randn(2048, 64, requires_grad=True)
    torch.compile(f, backend="lenz", options={"on_error": "raise"})(x, made()).backward()
    assert x.grad is not None and (x.grad == 2.0).all() and (scale == 1.0).all()


def doubled(x: Tensor, b: Tensor) -> Tensor:
    y = (x.float().sin() * b.float()).sum()
    x.mul_(2)
    return y + x.float().sum()


def doubled_in_part(x: Tensor, b: Tensor) -> Tensor:
    y = (x.float().sin() * b.float()).sum()
    x[:5].mul_(2)
    return y


def doubled_unseen(x: Tensor, b: Tensor) -> Tensor:
    y = (x[:, ::2].float().sin() * b[:, ::2].float()).sum()
    x.detach().mul_(2)
    return y


def added(x: Tensor, b: Tensor) -> Tensor:
    y = x[:, ::2].float().sin().sum()
    x.add_(b)
    return y + x.float().sum()


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize(
    "f", (doubled, doubled_in_part, doubled_unseen, added), ids=lambda f: f.__name__
)
def test_the_overwritten_argument_may_need_a_gradient(f: Function, dynamic: bool) -> None:
    """Eager saves x in f32, and not x itself."""
    found = []
    for run in (
        f,
        torch.compile(f, backend="lenz", dynamic=dynamic, options={"on_error": "raise"}),
    ):
        torch.manual_seed(0)
        leaf, b = randn(2048, 64, requires_grad=True), made()
        x = leaf.bfloat16()
        y = run(x, b)
        y.backward()
        found.append((y.detach(), leaf.grad, x.detach()))
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=1e-4)


def copies(f: Callable[..., Tensor], *args: Any) -> int:
    """How many copies the forward half makes."""
    forward, _ = cuda_programs(f, *args, dtype=torch.float32)
    return sum(n.target is torch.ops.aten.clone.default for n in forward.gm.graph.nodes)


def test_only_what_backward_needs_is_copied() -> None:
    """A batch norm overwrites its running statistics, which its gradient does not read."""

    def norm(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, training=True).tanh()

    x = Fake((8, 8, 64, 64), torch.float32, grad=True)
    assert copies(norm, x, (8,), (8,)) == 0
    assert copies(converted, Fake((64, 8), grad=True), Fake((64, 8))) == 1
