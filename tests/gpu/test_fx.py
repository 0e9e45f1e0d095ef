"""Plans of GPUs as FX graphs: kernels are launches of Triton kernels, which run as they are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn
from torch.fx import GraphModule

import lenz

KINDS = {"cuda": "triton_kernel_wrapper_mutation", "cpu": "lenz.launch.default"}


# FX of torch 2.11 takes every higher-order operator for dead code whose result nobody uses.
KNOWS_LAUNCHES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


class Seen(lenz.FxBackend):
    """A backend that keeps the graphs, without what FX takes for dead code."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []

    def compile_graph(self, gm: GraphModule) -> Callable[..., Sequence[Any]]:
        if KNOWS_LAUNCHES:
            gm.graph.eliminate_dead_code()
        gm.recompile()
        self.graphs.append(gm)
        return gm


def layer(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = F.gelu(x.softmax(-1) @ w)
    return h.sum(-1), h.t()[1:], h.sort(-1).values


def launches(gm: GraphModule, device: str) -> int:
    return sum(str(n.target) == KINDS[device] for n in gm.graph.nodes)


def test_a_graph_runs_as_it_is(device: str) -> None:
    seen = Seen()
    run = torch.compile(layer, backend=seen, dynamic=True)
    for n in (32, 33, 100):
        x, w = randn(n, 48, device=device), randn(48, 40, device=device)
        got, want = run(x, w), layer(x, w)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert [t.stride() for t in got] == [t.stride() for t in want]
    (gm,) = seen.graphs
    assert launches(gm, device) >= 2
    del run
    torch._dynamo.reset()
    gc.collect()
    sizes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    given = {32: 33, 48: 48, 40: 40}
    tensors = iter((randn(33, 48, device=device), w))
    args = [given[v] if isinstance(v, int) else next(tensors) for v in sizes]
    x = next(a for a in args if isinstance(a, Tensor))
    torch.testing.assert_close(tuple(gm(*args)), layer(x, w), rtol=1e-4, atol=1e-4)


def test_training_across_a_graph_break(device: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)

    def fn(x: Tensor) -> Tensor:
        h = model[1](model[0](x))
        torch._dynamo.graph_break()
        return model[2](h).square().sum()

    x, seen = randn(8, 16, device=device), Seen()
    wanted = torch.autograd.grad(fn(x), [*model.parameters()])
    got = torch.autograd.grad(torch.compile(fn, backend=seen)(x), [*model.parameters()])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert len(seen.graphs) == 4 and all(launches(g, device) for g in seen.graphs)


def test_kernels_go_to_the_current_stream(cuda: str) -> None:
    run = torch.compile(lambda x: x.sin() + 1, backend=Seen())
    x, values = randn(64, 64, device=cuda), randn(64, 64, device=cuda)
    run(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.copy_(values)
        got = run(x)
    stream.synchronize()
    torch.testing.assert_close(got, values.sin() + 1)


def test_constants_that_are_not_aligned(device: str) -> None:
    table = randn(1025, device=device)[1:]

    def fn(x: Tensor) -> Tensor:
        return x * table

    x = randn(1024, device=device)
    torch.testing.assert_close(torch.compile(fn, backend=Seen())(x), fn(x))


def test_an_argument_that_is_not_aligned(device: str) -> None:
    run = torch.compile(lambda x: x.sin() + 1, backend=Seen())
    memory = randn(1025, device=device)
    for x in (memory[:1024], memory[1:]):
        torch.testing.assert_close(run(x), x.sin() + 1)
