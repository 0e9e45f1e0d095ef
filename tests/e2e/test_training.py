"""Small models: results, gradients and several steps of an optimizer, beside eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn
from torch.utils.checkpoint import checkpoint

import lenz
from tests.e2e.sides import agree, gradients_agree


class Encoder(nn.Module):
    """One block: attention, layer norm, a wide layer with gelu."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.wide = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.wide(self.second(x))


class Tagger(nn.Module):
    """Embedding, encoder and cross entropy; one target is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.body = Encoder(16, 2)
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.table(x))).flatten(0, 1), y.flatten())


class Images(nn.Module):
    """Convolutions with batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).flatten(1)), y)


def steps(model: nn.Module, args: tuple[Tensor, ...], backend: str | None) -> list[Any]:
    """Losses of four steps, then all parameters and buffers."""
    model = copy.deepcopy(model)
    torch._dynamo.reset()
    run = torch.compile(model, backend=backend) if backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = run(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def test_four_steps_of_small_models() -> None:
    torch.manual_seed(0)
    target = torch.randint(0, 7, (2, 9))
    target[0, 3] = -100
    for model, args in (
        (Tagger(), (torch.randint(0, 11, (2, 9)), target)),
        (Images(), (randn(4, 3, 16, 16), torch.randint(0, 5, (4,)))),
        (Images().to(memory_format=torch.channels_last), (randn(4, 3, 16, 16), torch.arange(4))),  # type: ignore[call-overload]
    ):
        got, want = steps(model, args, "lenz"), steps(model, args, None)
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def test_gradients_of_pieces() -> None:
    def weights(*shapes: tuple[int, ...]) -> Any:
        return lambda: [randn(s, requires_grad=True) for s in shapes]

    heads = ((2, 2, 5, 8),) * 3
    gradients_agree(F.scaled_dot_product_attention, weights(*heads))
    gradients_agree(
        lambda x, w: checkpoint(lambda a: F.gelu(a @ w).sum(), x, use_reentrant=False),
        weights((4, 5), (5, 6)),
    )
    gradients_agree(lambda x, w, b: F.layer_norm(x, (40,), w, b), weights((7, 40), (40,), (40,)))
    gradients_agree(lambda x: x.softmax(0).log_softmax(1), weights((9, 30)))
    gradients_agree(lambda x: x.expand(4, 3, 5).t().sum(1) if x.dim() == 2 else x, weights((5,)))
    gradients_agree(lambda x: F.pad(x[::2], (1, -1)).unfold(1, 2, 1).amax(-1), weights((7, 8)))
    gradients_agree(lambda x: x[torch.tensor([0, 2, 2, -1])].cumsum(0).prod(1), weights((4, 3)))


def test_gradients_that_are_given_with_a_bit_for_their_sign_or_conjugate() -> None:
    """Memory holds the negative, or the conjugate, of what they are; their strides are dense."""
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        x = randn(6, dtype=dtype, requires_grad=True)
        run = torch.compile(lambda x: x * x * 2, backend="lenz")
        given = [torch._neg_view(randn(6, dtype=dtype)), randn(6, dtype=dtype).conj()]
        for g in [*given, torch._neg_view(given[1])]:
            (got,) = torch.autograd.grad(run(x), x, g)
            torch.testing.assert_close(got, torch.autograd.grad(x * x * 2, x, g)[0])


def test_hooks_may_give_saved_tensors_back_with_other_strides() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def step(run: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x, w = randn(16, 16, requires_grad=True), randn(16, 96, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(Tensor.contiguous, lambda t: t):
            y = run(x, w)
        return torch.autograd.grad(y.square().sum(), (x, w))

    got = step(torch.compile(f, backend="lenz"))
    torch.testing.assert_close(got, step(f), rtol=1e-4, atol=1e-4)


def test_a_compiled_optimizer_step() -> None:
    def run(backend: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        params = [randn(n, n + 1, requires_grad=True) for n in (3, 8, 1)]
        for p in params:
            p.grad = randn(p.shape)
        optimizer = torch.optim.AdamW(params, lr=0.1)
        step = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
        for _ in range(3):
            step()
        return [p.detach() for p in params]

    torch.testing.assert_close(run("lenz"), run(None))


# Ops whose results lenz takes as views of something, with the shape of an argument.
NO_VIEWS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "rot90": (lambda x: x.rot90(), (2, 3)),
    "unsafe_chunk": (lambda x: torch.unsafe_chunk(x, 2), (5, 5)),
    "unfold": (lambda x: F.unfold(x, 2), (1, 2, 5, 5)),
    "max_unpool": (lambda x: F.max_unpool2d(x, torch.arange(8).view(2, 2, 2), [2, 2]), (2, 2, 2)),
    "transposed sum": (lambda x: (x + 1).t(), (2, 3)),
    "view of an argument": (lambda x: x.t(), (2, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_VIEWS)
def test_results_may_be_written(name: str) -> None:
    """They leave an autograd.Function, which forbids writing to the views that it made."""
    fn, shape = NO_VIEWS[name]

    def step(run: Callable[[Tensor], Any]) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(0)
        leaf = randn(shape, requires_grad=True)
        results = run(leaf * 1)
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        for t in results:
            t.mul_(2)
        return results, torch.autograd.grad(sum(t.square().sum() for t in results), leaf)[0]

    torch.testing.assert_close(step(torch.compile(fn, backend="lenz")), step(fn))


@pytest.mark.parametrize("bad", (None, 0, 2))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16), ids=str)
def test_gradients_are_unscaled_in_the_graph(dtype: torch.dtype, bad: int | None) -> None:
    """What `GradScaler.unscale_` and `update` call writes lists, and is eager's to the bit."""

    def step(grads: list[Tensor], scale: Tensor, tracker: Tensor, found: Tensor) -> list[Tensor]:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale.reciprocal())
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 3)
        return [g.neg() for g in grads]

    def arguments() -> tuple[Any, ...]:
        grads = [torch.randn(5).to(dtype), torch.randn(3, 4).to(dtype).t(), torch.ones(9).to(dtype)]
        if bad is not None:
            grads[bad].view(-1)[3] = float("-inf")
        return grads, torch.tensor(3.0), torch.tensor(0, dtype=torch.int32), torch.zeros(1)

    assert lenz.explain(step)(*arguments()).op_calls[1:] == (0, 0)
    agree(step, arguments, tol=0, calls=3)


@pytest.mark.parametrize("native", [False, True])
def test_memory_of_others_is_not_given_to_gradients(native: bool) -> None:
    """Saved tensors that a hook keeps in arrays of numpy: those of 1 MiB or more may be reused."""
    run = torch.compile(
        lambda x, w: F.gelu(torch.tanh(x @ w)).sin(), backend="lenz", options={"native": native}
    )
    x, w = (torch.randn(512, 512, requires_grad=True) for _ in range(2))
    pack = lambda t: t.detach().numpy().copy()
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        y = run(x, w)
    first = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w)), first, rtol=0, atol=0)


@pytest.mark.parametrize("native", [False, True])
def test_a_hook_on_saved_tensors_may_return_negative_bits(native: bool) -> None:
    f = lambda x, w: (x.exp() * w).sum()
    run = torch.compile(f, backend="lenz", options={"native": native})
    pack = lambda t: torch.complex(torch.zeros_like(t), -t)
    found = []
    for g in (f, run):
        x, w = (torch.full((1,), k, requires_grad=True) for k in (1.0, 3.0))  # any stride will do
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda z: z.conj().imag):
            y = g(x, w)
        y.backward()
        found.append((x.grad, w.grad))
    torch.testing.assert_close(found[1], found[0])
