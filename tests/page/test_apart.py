"""Programs of which somebody could think that they are one kernel: the report says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lenz

Case = tuple[Callable[..., Any], tuple[Any, ...], str]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@torch.library.custom_op("lenz_test_page::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def between(x: Tensor) -> Tensor:
    h = x.exp()
    return (h @ h) + h.sum(1, keepdim=True).exp() + h


def many(xs: list[Tensor]) -> Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total - total.sum(-1, keepdim=True)


def costly(x: Tensor) -> Tensor:
    s = x.sum(-1, keepdim=True)
    for _ in range(40):
        x = torch.lgamma(x + s)
    return x


def differences(x: Tensor) -> Tensor:
    y = x.cumsum(0)
    return y[1:] - y[:-1]


def broken(x: Tensor) -> Tensor:
    y = x.exp()
    torch._dynamo.graph_break()
    return y + 1


LIBRARY = "is a library call, which no kernel can join"
SQUARE, IMAGE = normal(64, 64), normal(1, 3, 8, 8)
# A program, its arguments, and a part of the reason.
CASES: dict[str, Case] = {
    "relu of a product": (lambda x: (x @ x).relu(), (SQUARE,), f"aten.mm.default {LIBRARY}"),
    "relu of a convolution": (
        lambda x, w: F.conv2d(x, w).relu(),
        (IMAGE, normal(4, 3, 3, 3)),
        f"aten.convolution.default {LIBRARY}",
    ),
    "a scaled attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x) * 2,
        (normal(1, 2, 8, 8),),
        LIBRARY,
    ),
    "softmax of a batch of products": (
        lambda x: torch.bmm(x, x).softmax(-1),
        (normal(2, 8, 8),),
        f"aten.bmm.default {LIBRARY}",
    ),
    "a factor plus one": (
        lambda x: torch.linalg.qr(x.exp())[0] + 1,
        (normal(8, 8),),
        f"aten.linalg_qr.default {LIBRARY}",
    ),
    "a spectrum's size": (lambda x: torch.fft.fft(x.exp()).abs(), (normal(8),), LIBRARY),
    "both sides of a product": (between, (SQUARE,), "another step must run between them"),
    "an op of the user's": (
        lambda x: twice(x.exp()) + 1,
        (normal(8),),
        "lenz_test_page.twice.default runs in eager: no lowering",
    ),
    "samples of a grid": (
        lambda x, g: F.grid_sample(x, g, align_corners=False) + 1,
        (normal(1, 1, 8, 8), normal(1, 4, 4, 2)),
        "aten.grid_sampler_2d.default runs in eager: eager finds neighbours once",
    ),
    "a branch": (
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x.exp(),)) + 1,
        (normal(8),),
        "higher_order.cond runs in eager: not an aten op",
    ),
    "a scatter of exponentials": (
        lambda x, i: torch.zeros(8, 8).index_add(0, i, x.exp()).sum(1) * 2,
        (normal(5, 8), torch.tensor([1, 2, 3, 1, 0])),
        "a scatter runs by itself",
    ),
    "sums of sorted rows": (
        lambda x: (torch.sort(x.exp())[0] * 2).sum(0),
        (normal(8, 16),),
        "reduces over other rows than",
    ),
    "running sums both ways": (
        lambda x: x.cumsum(1).cumsum(0),
        (normal(8, 16),),
        "cumsum_1 reduces over other rows than cumsum",
    ),
    "softmax both ways": (
        lambda x: x.softmax(1).softmax(0),
        (SQUARE,),
        "reads other elements of _softmax than the loop computes",
    ),
    "softmax from behind": (
        lambda x: x.softmax(1) + x.softmax(1).flip(1).cumsum(1),
        (SQUARE,),
        "cumsum reads other elements of _softmax than the loop computes",
    ),
    "rows of a softmax": (
        lambda x, i: x.softmax(1)[i] * 2,
        (normal(64, 32), torch.tensor([3, 1])),
        "mul reads other elements of max than the loop computes",
    ),
    "sums after a batch norm": (
        lambda x: F.batch_norm(x, None, None, training=True).sum((2, 3)),
        (normal(4, 3, 16, 16),),
        "sum_1 reduces over other rows than invstd",
    ),
    "a variance of variances": (
        lambda x: x.var(1).var(0),
        (SQUARE,),
        "var_1 reduces over other rows than var",
    ),
    "forty arguments": (
        many,
        ([normal(8, 64) for _ in range(40)],),
        "together they touch more than 24 buffers",
    ),
    "forty gammas": (costly, (SQUARE,), "additions per element"),
    "the largest of windows": (
        lambda x: F.max_pool2d(x.exp(), 2).sum(1),
        (IMAGE,),
        "their loops have different extents",
    ),
    "differences of running sums": (
        differences,
        (normal(64),),
        "their loops have different extents",
    ),
    "behind a graph break": (broken, (normal(8),), "graph_break"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reason_is_named(name: str) -> None:
    fn, args, why = CASES[name]
    torch._dynamo.reset()
    report = lenz.explain(fn)(*args)
    graphs = report.data()["graphs"]
    assert len(report.launches) > 1, "it is one kernel: it needs no reason"
    told = [p["why"] for g in graphs for p in g["apart"]] + [g["ended_by"] for g in graphs]
    assert any(why in t for t in told), told
    for g in graphs:
        for pair in g["apart"]:
            assert pair["steps"] and max(pair["steps"]) < len(g["steps"]), "it leads to its steps"


def test_one_kernel_has_nothing_apart() -> None:
    (graph,) = lenz.explain(lambda x: x.softmax(-1) * 2)(SQUARE).data()["graphs"]
    assert graph["apart"] == [] and len(graph["steps"]) == 1


def test_each_edge_between_kernels_has_a_reason() -> None:
    """Whatever reads what another step wrote is either in the same kernel or told of."""
    torch._dynamo.reset()
    for name in ("both sides of a product", "a scatter of exponentials", "softmax both ways"):
        fn, args, _ = CASES[name]
        (graph,) = lenz.explain(fn)(*args).data()["graphs"]
        told = {tuple(p["steps"]) for p in graph["apart"]}
        edges = {(n, k) for k, step in enumerate(graph["steps"]) for n in step["needs"]}
        kernels = {k for k, step in enumerate(graph["steps"]) if step["what"] == "kernel"}
        assert edges and {e for e in edges if kernels & {*e}} <= told, name
