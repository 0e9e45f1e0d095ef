"""lenz adds no guard: whatever aot_eager compiles once for all sizes, lenz does too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, randn
from torch._dynamo.backends.registry import lookup_backend
from torch._guards import detect_fake_mode
from torch.fx import GraphModule


def guards(fn: Callable[..., Any], args: Sequence[Any], backend: str) -> list[list[str]]:
    """The conditions on sizes of each graph, once forward and backward have been compiled."""
    environments: list[Any] = []

    def watched(gm: GraphModule, inputs: list[Any]) -> Any:
        mode = detect_fake_mode(inputs)
        assert mode is not None
        environments.append(mode.shape_env)
        return lookup_backend(backend)(gm, inputs)

    torch._dynamo.reset()
    out = torch.compile(fn, backend=watched, dynamic=True)(*args)
    if isinstance(out, Tensor) and out.requires_grad:
        out.sum().backward()
    # A graph of the cache asks once for what torch's trace asks for twice.
    return [[*dict.fromkeys(str(g.expr) for g in env.guards)] for env in environments]


def grad(*shape: int) -> Tensor:
    return randn(shape, requires_grad=True)


def written(x: Tensor) -> Tensor:
    x[1:].mul_(2)
    return x.t().contiguous().view(-1).cumsum(0)


def many_views(x: Tensor) -> Any:
    n, m = x.shape
    return x.reshape(n * m).view(m, n).t() + 1, x[n // 2 :, -3:].flip(0), x.repeat(2, 1), x.roll(2)


def numbers(x: Tensor, y: Tensor) -> Any:
    n, m, k = x.shape
    rows = (x.reshape(n * m, k).sum(1) / x.numel(), n * m * k // 2 + 8 * n * k)
    return *rows, y.sum() * (n * m - k) + int(n / 1.5), x.mean() + n // 2 * (m // 2)


def sliced(x: Tensor) -> Any:
    return x[: x.shape[0] // 3].sum(0), x.unfold(0, 3, 2).mean(-1), x.chunk(3), x[::2, 1::3] * 2


def indexed(x: Tensor, i: Tensor) -> Any:
    y = torch.zeros(x.shape[0] + 1, x.shape[1]).index_add(0, i, x)
    return x[i], y, x.gather(0, i[:, None].expand(-1, 7)), F.pad(x, (1, 2)), torch.cat([x, y])


def attention(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "elements": (lambda x, y: (x * y + x.shape[0]).softmax(-1), lambda: (randn(5, 7), randn(7))),
    "reductions": (lambda x: (x.sum(), x.var(0), x.amax(1), x.argmin()), lambda: (randn(5, 7),)),
    "numbers": (numbers, lambda: (randn(9, 7, 5), randn(9))),
    "views": (many_views, lambda: (randn(9, 7),)),
    "slices": (sliced, lambda: (randn(20, 7),)),
    "indices": (indexed, lambda: (randn(9, 7), torch.arange(9))),
    "writes": (written, lambda: (randn(9, 7),)),
    "offsets": (lambda x: x.add_(1), lambda: (randn(12)[3:],)),
    "strides": (lambda x: (x + 1, x.sum(1)), lambda: (randn(9, 8)[:, 1:6].t(),)),
    "norm": (lambda x, w: F.layer_norm(x @ w, (5,)).relu(), lambda: (grad(9, 7), grad(7, 5))),
    "loss": (lambda x: F.cross_entropy(x, torch.zeros(9).long()), lambda: (grad(9, 7),)),
    "conv": (lambda x, w: F.conv1d(x, w).relu(), lambda: (grad(2, 3, 9), grad(4, 3, 3))),
    "pool": (lambda x: F.max_pool1d(x, 2) * 2, lambda: (grad(2, 3, 9),)),
    "attention": (attention, lambda: (grad(2, 2, 9, 8),)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), lambda: (grad(9, 7),)),
    "dropout": (lambda x: F.dropout(x, 0.5).cumsum(0), lambda: (grad(9, 7),)),
    "sort": (lambda x: (x.sort(0)[0] * 2, x.topk(2)[0]), lambda: (randn(9, 7),)),
    "fft": (lambda x: torch.fft.rfft(x).abs(), lambda: (grad(3, 9),)),
    "broadcast": (lambda x, y: x[:, None] * y[None] + y.shape[0] * 2, lambda: (grad(9), grad(7))),
    "linspace": (lambda x: x + torch.linspace(0, 1, x.shape[0]), lambda: (grad(9),)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_no_condition_on_sizes_is_added(name: str) -> None:
    fn, make = CASES[name]
    theirs, ours = (guards(fn, make(), backend) for backend in ("aot_eager", "lenz"))
    assert theirs, "nothing was compiled"
    assert ours == theirs


@pytest.mark.parametrize("dynamic", (True, None))
def test_one_compilation_serves_all_sizes_that_follow(dynamic: bool | None) -> None:
    """With automatic dynamic sizes the first size has a compilation of its own."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("lenz")
    run = torch.compile(lambda x, w: (x @ w).relu().sum(0), backend=counter, dynamic=dynamic)
    for n in (1000, 2000, 3000, 17):
        x, w = randn(n, 7), randn(7, 5)
        torch.testing.assert_close(run(x, w), (x @ w).relu().sum(0), rtol=1e-3, atol=1e-3)
    assert counter.frame_count == (1 if dynamic else 2)
