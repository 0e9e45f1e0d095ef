"""A backward half whose saved tensors have other strides than eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lenz.frontend.restride import restride
from tests.cuda import cuda_program


def traced(f: Any, *args: Tensor) -> Any:
    return make_fx(f, tracing_mode="fake")(*args)


def fake_like(gm: Any, *args: Tensor) -> list[Tensor]:
    """The arguments as fake tensors of the trace's own mode."""
    place = next(n for n in gm.graph.nodes if n.op == "placeholder")
    mode: FakeTensorMode = place.meta["val"].fake_mode
    return [mode.from_tensor(a) for a in args]


def test_results_get_the_strides_that_follow() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b = x.view(2, 2, 5).split(1)
        return torch.mm(x.t(), y), a.sin(), b, x.view(20), y * 2

    x, y = torch.randn(4, 5), torch.randn(4, 3)
    gm = traced(f, x, y)
    wide = torch.zeros(4, 8)[:, :5].copy_(x)
    restride(gm, fake_like(gm, wide, y))
    torch.testing.assert_close(torch.fx.Interpreter(gm).run(wide, y), f(x, y))
    values: dict[str, Any] = {}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            values[n.name] = super().run_node(n)
            return values[n.name]

    Watch(gm).run(wide, y)
    for n in gm.graph.nodes:
        if isinstance(values.get(n.name), Tensor):
            assert n.meta["val"].stride() == values[n.name].stride(), n
    assert "reshape" in gm.print_readable(print_output=False), "a view of padded memory"


def test_equal_strides_change_nothing() -> None:
    x = torch.randn(4, 5)
    gm = traced(lambda x: x.t().exp(), x)
    before = [n.meta["val"] for n in gm.graph.nodes if n.op == "call_function"]
    restride(gm, fake_like(gm, x))
    after = [n.meta["val"] for n in gm.graph.nodes if n.op == "call_function"]
    assert all(a is b for a, b in zip(before, after, strict=True))


def last(*shape: int) -> Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("fn", "x", "is_graded"),
    [
        (lambda x: 2.0**x, last(2, 3, 4, 4), False),
        (lambda x: F.logsigmoid(x) * 2, last(2, 3, 4, 4), False),
        (lambda x: torch.isin(x, x[0, 0, 0]), last(2, 3, 4, 4), False),
        (lambda x: x.roll(1, 1), last(2, 3, 4, 4), False),
        (lambda x: x.roll(3, 1), last(2, 3, 4, 4), False),
        (lambda x: x.roll((1, 4), (1, 2)), last(2, 3, 4, 4), False),
        (lambda x: x.roll(1), last(2, 3, 4, 4), False),
        (lambda x: torch.channel_shuffle(x, 2), last(2, 4, 4, 4), False),
        (lambda x: torch.copysign(x, torch.tensor(-1.0)), torch.randn(4, 5).t(), False),
        (lambda x: x // torch.tensor(0.3), torch.randn(4, 5).t(), False),
        (lambda x: torch.logical_and(x[0], x), torch.randn(3, 5, 2).transpose(1, 2), False),
        (lambda x: torch.ldexp(x[:1], x), torch.ones(3, 5, 2).transpose(1, 2), False),
        (lambda x: torch.xlogy(x[..., :1], x.abs()), torch.randn(3, 5, 2).permute(1, 2, 0), False),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), last(1, 3, 5, 5), True),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), last(1, 3, 5, 5), True),
        (lambda x: F.glu(x, -1), last(2, 3, 4, 4), True),
        (lambda x: F.mse_loss(x, x.detach() + 1), torch.randn(4, 5).t(), True),
        (lambda x: F.log_softmax(x, 1) * 2, torch.randn(4, 5).t(), True),
        (lambda x: F.batch_norm(x, None, None, training=True).contiguous(), last(2, 3, 4, 4), True),
        (lambda x: F.batch_norm(x, None, None, training=True), torch.randn(3, 2, 4).mT, True),
    ],
)  # fmt: skip
def test_strides_that_fake_tensors_tell_wrong_are_eager_s(
    fn: Any, x: Tensor, is_graded: bool
) -> None:
    def both(run: Any) -> list[Tensor]:
        leaf = x.detach().requires_grad_(is_graded)
        y = run(leaf)
        return [y, *(torch.autograd.grad(y.sum(), leaf) if is_graded else ())]

    run = torch.compile(fn, backend="lenz")
    for got, want in zip(both(run), both(fn), strict=True):
        torch.testing.assert_close(got, want, check_stride=True)


def test_shuffled_pixels_are_dense_on_gpus() -> None:
    """Eager has no kernel of its own for them there, as it has on CPUs; measured on an H100."""
    for fn in (lambda x: F.pixel_shuffle(x, 2), lambda x: F.pixel_unshuffle(x, 2)):

        def run(x: Tensor, fn: Any = fn) -> Tensor:
            return fn(x.to(memory_format=torch.channels_last)) + 1

        program = cuda_program(run, (2, 8, 4, 6))
        (out,) = (n for n in program.gm.graph.nodes if n.op == "output")
        assert out.args[0][0].meta["val"].is_contiguous()


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (lambda x: x.roll(1, 1), last(2, 3, 4, 4)),
        (lambda x: F.logsigmoid(x) * 2, last(2, 3, 4, 4)),
        (lambda x: F.batch_norm(x, None, None, training=True), last(2, 3, 4, 4)),
        (lambda x: F.batch_norm(x, None, None, training=True), torch.randn(2, 3, 4, 4).mT),
        (lambda x: torch.logical_or(x[0, 0], x), torch.randn(2, 3, 5, 4).mT),
    ],
)
def test_strides_that_are_symbolic_and_told_wrong(fn: Any, x: Tensor) -> None:
    got = torch.compile(fn, backend="lenz", dynamic=True)(x)
    torch.testing.assert_close(got, fn(x), check_stride=True)


def test_strides_over_memory_with_an_offset_of_its_own() -> None:
    def fn(x: Tensor, at: int) -> Tensor:
        return torch.as_strided_copy(x, (2,), (1,), at)

    x = torch.randn(5, requires_grad=True)
    got = torch.autograd.grad(torch.compile(fn, backend="lenz", dynamic=True)(x, 2).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(fn(x, 2).sum(), x))
