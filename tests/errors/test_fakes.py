"""Fake tensors of the caller's own: they have no memory, and kernels never see them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lenz.errors import UserError

EAGER = "ignore:lenz runs a graph in eager"


def block(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(-1) + 1


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.filterwarnings(EAGER)
@pytest.mark.parametrize("is_warm", (False, True))
@pytest.mark.parametrize("dynamic", (False, True))
def test_fake_arguments_give_fake_results(dynamic: bool, is_warm: bool) -> None:
    """The process died of a null pointer; eager and aot_eager take them."""
    run = torch.compile(block, backend="lenz", dynamic=dynamic)
    if is_warm:
        run(torch.rand(3, 4))
    mode = FakeTensorMode()
    with mode:
        x = torch.rand(3, 4, requires_grad=True)
    y = run(x)
    with mode:
        found = run(torch.rand(3, 4))
        (gradient,) = torch.autograd.grad(y.sum(), x)
    for t in (y, found, gradient):
        assert isinstance(t, FakeTensor)
    assert y.shape == (3, 3) and gradient.shape == (3, 4)
    x = torch.rand(3, 4)
    torch.testing.assert_close(run(x), block(x))


@pytest.mark.filterwarnings(EAGER)
def test_fake_arguments_beside_real_weights() -> None:
    layer = nn.Linear(4, 5)
    run = torch.compile(layer, backend="lenz")
    run(torch.rand(3, 4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(run(torch.rand(3, 4)), FakeTensor)


@pytest.mark.filterwarnings("error:lenz")
def test_a_mode_of_fakes_around_real_arguments_is_named() -> None:
    """What the plan itself makes would be fake there; no guard of Dynamo's knows."""
    run = torch.compile(block, backend="lenz")
    x = torch.rand(3, 4)
    run(x)
    ones = torch.compile(lambda: torch.ones(3).sin(), backend="lenz")
    ones()
    for call in (lambda: run(x), ones):
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(UserError, match="Fake"):
            call()
    torch.testing.assert_close(run(x), block(x))


def test_other_modes_change_nothing() -> None:
    class Quiet(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is untyped here
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    run, x = torch.compile(block, backend="lenz"), torch.rand(3, 4)
    want = run(x)
    with Quiet():
        torch.testing.assert_close(run(x), want)
