"""What surrounds a graph: dynamic sizes, breaks, grad modes, autocast, custom ops, control flow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._higher_order_ops.while_loop import while_loop

import lenz
from tests.e2e.sides import agree, gradients_agree


def test_one_compilation_serves_many_sizes() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        z = x.t() + y
        return (
            z.sum(0) * x.shape[0], z.reshape(-1)[::2] * 1, z.softmax(0), z.argmax(),
            torch.cat([x, y.t()], 1).sum(1), z.flip(0).roll(2, 1), x.mean(),
        )  # fmt: skip

    counter = CompileCounterWithBackend("lenz")
    run = torch.compile(fn, backend=counter, dynamic=True)
    for n in (8, 9, 33, 130, 2):
        x, y = randn(n, n + 1), randn(n + 1, n)
        torch.testing.assert_close(run(x, y), fn(x, y), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1
    for n in (1, 0):  # torch makes graphs of their own for these
        x, y = randn(n, n + 1), randn(n + 1, n)
        if n:
            torch.testing.assert_close(run(x, y), fn(x, y), rtol=1e-4, atol=1e-4)


def test_writes_with_dynamic_sizes() -> None:
    def fn(x: Tensor) -> Tensor:
        x[1:].mul_(2)
        return x.cumsum(0)

    run = torch.compile(fn, backend="lenz", dynamic=True)
    for n in (5, 4097, 3, 1, 0):
        x = randn(n)
        y = x.clone()
        torch.testing.assert_close(run(x), fn(y), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(x, y)


def test_sizes_known_from_data() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        z = y[x.nonzero()[:, 0]]
        flat = z.t().contiguous().view(-1)
        return z.t().reshape(-1) * 2, z.sum(0), z.softmax(0), flat.sum(), z.sum()

    def counted(x: Tensor) -> Any:
        n = x[0].item()
        torch._check(n >= 0)
        torch._check(n <= 10)
        return torch.arange(n) * 2 + x[1], torch.zeros(n, 3).sum(0)  # type: ignore[arg-type]

    config = torch._dynamo.config
    with config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        run = torch.compile(fn, backend="lenz", dynamic=True, fullgraph=True)
        count = torch.compile(counted, backend="lenz", fullgraph=True)
        for n in (5, 0, 1, 7):
            args = torch.tensor([1.0] * n + [0.0] * 4), randn(n + 4, 6)
            torch.testing.assert_close(run(*args), fn(*args))
            torch.testing.assert_close(count(torch.tensor([n, 4])), counted(torch.tensor([n, 4])))


def test_conditions_on_sizes_from_data_are_asserted() -> None:
    def fn(x: Tensor, at: Tensor) -> Any:
        big = x[x > 0] * 2
        torch._check(big.shape[0] < 4, lambda: "too many")
        return big + 1, [part + 1 for part in x.tensor_split(at)]

    def args(n: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([1.0] * n + [-1.0] * (6 - n)), torch.tensor([1, n])

    config = torch._dynamo.config
    with config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        report = lenz.explain(fn)(*args(2))
        run = torch.compile(fn, backend="lenz", fullgraph=True)
        for n in (3, 2):
            torch.testing.assert_close(run(*args(n)), fn(*args(n)))
        with pytest.raises(RuntimeError, match="u0 <= 3"):
            run(*args(5))
    assert not any(g.skips for g in report.graphs), "a condition on sizes put a graph into eager"


def test_sizes_that_only_python_computes() -> None:
    fn = lambda x, at: torch.narrow(x, 0, at, 2) + 1  # its end is a choice: 0 for a start of -2
    for at in (-2, 1, 0):
        args = torch.arange(6).view(3, 2), torch.tensor(at)
        run = torch.compile(fn, backend="lenz", dynamic=True)
        assert torch.equal(run(*args), fn(*args))


def test_sizes_from_data_are_not_taken_for_types() -> None:
    def fn(x: Tensor) -> Any:
        return [x[x > k] * 2 for k in range(10)]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = torch.arange(12, dtype=torch.uint8)  # u8 is the ninth of the sizes
        for got, want in zip(torch.compile(fn, backend="lenz")(x), fn(x), strict=True):
            assert torch.equal(got, want)


def test_graph_breaks() -> None:
    layer = nn.Linear(16, 16)

    def fn(x: Tensor) -> Tensor:
        h = F.gelu(layer(x))
        torch._dynamo.graph_break()
        x.add_(1)
        torch._dynamo.graph_break()
        return (layer(h) + x).sum(-1)

    with torch.no_grad():
        agree(fn, lambda: (randn(8, 16),), calls=2)
    gradients_agree(
        lambda w: torch.compiler.disable(torch.sin)(F.gelu(w @ w.t())).cos().sum(),
        lambda: (randn(6, 5, requires_grad=True),),
    )


def test_grad_modes_and_autocast() -> None:
    layer = nn.Linear(8, 8)

    def fn(x: Tensor) -> Any:
        return layer(x).relu(), x.view(-1)[1:] * 1

    def cast(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.gelu(layer(x)).float().sum(), layer(x)

    def make() -> Any:
        return (randn(4, 8),)

    agree(fn, make)
    with torch.no_grad():
        agree(fn, make)
    with torch.inference_mode():
        agree(fn, make)
    agree(cast, make, tol=3e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agree(fn, make, tol=3e-2)


@torch.library.custom_op("lenz_tests::scale", mutates_args=())
def scale(x: Tensor, a: float) -> Tensor:
    return x * a


@scale.register_fake
def _(x: Tensor, a: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lenz_tests::inc", mutates_args=("x",))
def inc(x: Tensor, n: int) -> None:
    x.add_(n)


@torch.library.custom_op("lenz_tests::both", mutates_args=("x", "y"))
def both(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    y.mul_(2)
    return x + y


@both.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.filterwarnings("ignore:.*in eager.*")
def test_custom_ops() -> None:
    def temporary(x: Tensor) -> Any:
        y = x.sin()
        inc(y, 2)
        return y * 2, x + 1

    one, two = lambda: (randn(5),), lambda: (randn(5), randn(5))
    agree(lambda x: scale(x + 1, 2.0).sin(), one)
    agree(lambda x: (inc(x, 2), x * 2)[1], one)
    agree(lambda x: (inc(x[1:3], 2), x * 2)[1], one)
    agree(temporary, one)
    agree(lambda x, y: (both(x, y), x * 2, y + 1), two)


def test_control_flow_is_called_in_eager() -> None:
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda a: a.sin() + 1, lambda a: a.cos() * 2, (x + 1,)) * 2

    def loop(n: int) -> Any:
        def fn(x: Tensor) -> Any:
            carried = (torch.tensor(0), x + 1)
            r = while_loop(lambda i, t: i < n, lambda i, t: (i + 1, t * 2), carried)
            later = (torch.sort(x * 3)[0] * 2).sort()[0]  # may reuse what died, not what is carried
            return r[1] * 1.0 + later[0] * 0, later

        return fn

    for sign in (1, -1):
        agree(branch, lambda: (randn(20).abs() * sign,))
    for n in (0, 3):
        agree(loop(n), lambda: (randn(20),))


def test_dropout_draws_the_same_in_both_passes() -> None:
    n, p = 100_000, 0.3
    x = torch.ones(n, requires_grad=True)
    run = torch.compile(lambda x: F.dropout(x, p, True), backend="lenz")
    torch.manual_seed(3)
    y = run(x)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    # Kept elements are binomial: five standard deviations of a rate.
    assert abs((y > 0).float().mean() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    torch.testing.assert_close(y.max(), torch.tensor(1 / (1 - p)))
    torch.manual_seed(3)
    assert torch.equal(run(x), y)
    assert not torch.equal(run(x), y)
