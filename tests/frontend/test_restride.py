"""A backward half whose saved tensors have other strides than eager's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lenz.frontend.restride import restride
from lenz.frontend.strides import eager_strides
from tests.cuda import cuda_program

aten = torch.ops.aten


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


@pytest.mark.one_in(2)
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
        (lambda x: x.roll(1, -4), torch.randn(0, 1, 1, 1), False),
        (lambda x: torch.channel_shuffle(x, 2), last(2, 4, 4, 4), False),
        (lambda x: torch.copysign(x, torch.tensor(-1.0)), torch.randn(4, 5).t(), False),
        (lambda x: x // torch.tensor(0.3), torch.randn(4, 5).t(), False),
        (lambda x: torch.logical_and(x[0], x), torch.randn(3, 5, 2).transpose(1, 2), False),
        (lambda x: torch.ldexp(x[:1], x), torch.ones(3, 5, 2).transpose(1, 2), False),
        (lambda x: torch.xlogy(x[..., :1], x.abs()), torch.randn(3, 5, 2).permute(1, 2, 0), False),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), last(1, 3, 5, 5), True),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), last(1, 3, 5, 5), True),
        (lambda x: F.pad(x, (-1, -1, 0, -1), mode="replicate"), last(1, 3, 5, 5), True),
        (lambda x: torch.fft.fft(x, 10, 1).abs(), torch.randn(5, 6, 7), True),
        (lambda x: torch.fft.irfft2(torch.complex(x, x)), torch.randn(5, 7, 6).mT, True),
        (lambda x: torch.fft.ihfft(x, 8, -2, "ortho").real, torch.randn(5, 7, 6).mT, True),
        (lambda x: F.glu(x, -1), last(2, 3, 4, 4), True),
        (lambda x: F.mse_loss(x, x.detach() + 1), torch.randn(4, 5).t(), True),
        (lambda x: F.log_softmax(x, 1) * 2, torch.randn(4, 5).t(), True),
        (lambda x: torch.complex(x, -x).angle(), torch.randn(4, 5).t(), False),
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
        (lambda x: F.pad(x, (0, 0, 3 - len(x), 0)) if len(x) > 3 else x, torch.randn(5, 4).t()),
    ],
)
def test_strides_that_are_symbolic_and_told_wrong(fn: Any, x: Tensor) -> None:
    got = torch.compile(fn, backend="lenz", dynamic=True)(x)
    torch.testing.assert_close(got, fn(x), check_stride=True)


def test_fourier_transforms_order_dimensions_as_eager_does() -> None:
    """The rules of torch 2.11 put transformed dimensions in another order."""
    if not torch.backends.mkl.is_available():
        pytest.skip("other libraries give dense results")
    for seed in range(200):
        chance = random.Random(seed)
        order = chance.sample(range(4), 4)
        x = torch.zeros([chance.randint(2, 5) for _ in order]).permute(order)
        z, dims = torch.complex(x, x).permute(order), chance.sample(range(4), chance.randint(1, 4))
        for op, of, args in (
            ("_fft_c2c", z, (0, True)),
            ("_fft_r2c", x, (0, True)),
            ("_fft_r2c", x, (0, False)),
            ("_fft_c2r", z, (0, 2 * z.shape[dims[-1]] - 2)),
        ):
            want: Tensor = getattr(aten, op).default(of, dims, *args)
            told = want.contiguous()
            got = eager_strides(getattr(aten, op).default, (of, dims, *args), told)
            assert (told.stride() if got is None else got) == want.stride(), (op, of.stride(), dims)


def test_the_log_sum_exp_of_f64_is_f64() -> None:
    q = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    gm = traced(lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[1].exp(), q)
    for n in gm.graph.nodes:  # as torch 2.11 tells it
        if isinstance(n.meta.get("val"), tuple):
            n.meta["val"] = (n.meta["val"][0], n.meta["val"][1].float())
        elif n.op == "call_function":
            n.meta["val"] = n.meta["val"].float()
    restride(gm, ())
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "call_function"]
    assert values[0][1].dtype is torch.float64
    assert {v.dtype for v in values[1:]} == {torch.float64}
    leaf = q.clone().requires_grad_()
    run = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q).sin(), backend="lenz")
    (got,) = torch.autograd.grad(run(leaf).sum(), leaf)
    (want,) = torch.autograd.grad(
        F.scaled_dot_product_attention(leaf, leaf, leaf).sin().sum(), leaf
    )
    torch.testing.assert_close(got, want, check_stride=True)


def test_strides_over_memory_with_an_offset_of_its_own() -> None:
    def fn(x: Tensor, at: int) -> Tensor:
        return torch.as_strided_copy(x, (2,), (1,), at)

    x = torch.randn(5, requires_grad=True)
    got = torch.autograd.grad(torch.compile(fn, backend="lenz", dynamic=True)(x, 2).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(fn(x, 2).sum(), x))
