"""The passes on graphs of FX, each rule in both directions: what goes, and what must stay."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lenz.frontend import origin
from lenz.frontend.decompose import decompositions
from lenz.frontend.normalise import multiply_in_pairs, normalise, written_by
from lenz.traits import has

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


def traced(f: Callable[..., Any], *args: Tensor) -> torch.fx.GraphModule:
    gm = make_fx(f, tracing_mode="fake")(*args)
    normalise(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def calls(gm: torch.fx.GraphModule) -> list[str]:
    return [n.target.__name__ for n in gm.graph.nodes if n.op == "call_function"]


KEPT: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "alias inside": (lambda x: aten.alias(x) + 1, ["add.Tensor"]),
    "alias returned": (lambda x: aten.alias(x), ["alias.default"]),
    "view to the same": (lambda x: aten.view(x, [2, 3]) * 2, ["mul.Tensor"]),
    "view to another": (lambda x: aten.view(x, [6]) * 2, ["view.default", "mul.Tensor"]),
    "copy inside": (lambda x: aten.clone(x) * 2, ["mul.Tensor"]),
    "copy returned": (lambda x: aten.clone(x), ["clone.default"]),
    "copy whose view is returned": (
        lambda x: aten.view(aten.clone(x), [6]),
        ["clone.default", "view.default"],
    ),
    "copy to other strides": (
        lambda x: aten.view(aten.clone(x.t(), memory_format=torch.contiguous_format), [6]) * 1,
        ["t.default", "clone.default", "view.default", "mul.Tensor"],
    ),
    "cast to the same": (lambda x: aten._to_copy(x, dtype=torch.float32) + 1, ["add.Tensor"]),
    "cast to another": (
        lambda x: aten._to_copy(x, dtype=torch.float64) + 1,
        ["_to_copy.default", "add.Tensor"],
    ),
    "copy of a written argument": (
        lambda x: (aten.clone(x), aten.add_(x, 1))[0] * 2,
        ["clone.default", "add_.Tensor", "mul.Tensor"],
    ),
    "copy that is written": (
        lambda x: aten.add_(aten.clone(x), x) * 2,
        ["clone.default", "add_.Tensor", "mul.Tensor"],
    ),
    "copy read by offset": (
        lambda x: aten.as_strided(aten.clone(x[1:]), [2], [1], 1) * 2,
        ["slice.Tensor", "clone.default", "as_strided.default", "mul.Tensor"],
    ),
    "dense strides": (
        lambda x: aten.as_strided(aten.sin(x), [3, 1, 2], [2, 7, 1]) * 2,
        ["sin.default", "view.default", "mul.Tensor"],
    ),
    "strides that are not dense": (
        lambda x: aten.as_strided(aten.sin(x), [3, 2], [1, 3]) * 2,
        ["sin.default", "as_strided.default", "mul.Tensor"],
    ),
    "dense strides from another element": (
        lambda x: aten.as_strided(x[1:], [3], [1], 0) * 2,
        ["slice.Tensor", "as_strided.default", "mul.Tensor"],
    ),
    "a write through dense strides": (
        lambda x: aten.as_strided_scatter(aten.cos(x), aten.sin(x).t(), [3, 2], [2, 1]) * 2,
        ["sin.default", "t.default", "clone.default", "view.default", "mul.Tensor"],
    ),
    "a write through dense strides that converts": (
        lambda x: aten.as_strided_scatter(x, aten.sin(x).t().double(), [3, 2], [2, 1]) * 2,
        [
            "sin.default",
            "t.default",
            "_to_copy.default",
            "as_strided_scatter.default",
            "mul.Tensor",
        ],
    ),
    "a write through strides to a part": (
        lambda x: aten.as_strided_scatter(x, aten.sin(x)[0], [3], [2]) * 2,
        ["sin.default", "select.int", "as_strided_scatter.default", "mul.Tensor"],
    ),
    "equal calls": (lambda x: aten.sin(x) + aten.sin(x), ["sin.default", "add.Tensor"]),
    "equal calls, numbers apart by type": (
        lambda x: aten.div(x, 0.0) + aten.div(x, -0.0),
        ["div.Tensor", "div.Tensor", "add.Tensor"],
    ),
    "equal results": (lambda x: (aten.sin(x), aten.sin(x)), ["sin.default", "sin.default"]),
    "equal calls around a write": (
        lambda x: aten.sin(x) + (aten.add_(x, 1), aten.sin(x))[1],
        ["sin.default", "add_.Tensor", "sin.default", "add.Tensor"],
    ),
    "random": (
        lambda x: aten.rand_like(x) + aten.rand_like(x),
        ["rand_like.default"] * 2 + ["add.Tensor"],
    ),
    "empty": (
        lambda x: aten.add_(aten.empty_like(x), 1) + aten.empty_like(x),
        ["empty_like.default", "add_.Tensor", "empty_like.default", "add.Tensor"],
    ),
    "dead": (lambda x: (aten.cos(x), aten.sin(x))[1], ["sin.default"]),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_stays(name: str) -> None:
    f, want = KEPT[name]
    gm = traced(f, X.clone())
    assert calls(gm) == want
    if name not in ("random", "empty"):
        ours, theirs = X.clone(), X.clone()
        torch.testing.assert_close(gm(ours), f(theirs), equal_nan=True)
        torch.testing.assert_close(ours, theirs)


def test_products_of_sizes_have_two_arguments() -> None:
    """What runs in eager is Python text, in which a third argument is lost: docs/upstream."""
    graph = torch.fx.Graph()
    sizes = [graph.placeholder(name) for name in "abcd"]
    for n, value in zip(sizes, (2, 3, 5, 7), strict=True):
        n.meta["val"] = value
    product = graph.call_function(operator.mul, tuple(sizes))
    product.meta["val"] = 210
    graph.output(product)
    multiply_in_pairs(graph)
    assert torch.fx.GraphModule(torch.nn.Module(), graph)(2, 3, 5, 7) == 210
    assert [n.meta["val"] for n in graph.nodes if n.op == "call_function"] == [6, 30, 210]


def test_written_follows_the_schema() -> None:
    gm = make_fx(lambda x, y: aten.add(x, aten.copy_(y, x)), tracing_mode="fake")(X, X)
    names = {
        n.name: [w.name for w in written_by(n)] for n in gm.graph.nodes if n.op == "call_function"
    }
    assert list(names.values()) == [["y_1"], []]


def test_layouts_with_symbols_add_no_guard() -> None:
    gm = make_fx(lambda x: aten.clone(x) + aten.view(x, x.shape), tracing_mode="symbolic")(X)
    value = next(n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder")
    env = value.fake_mode.shape_env
    before = len(env.guards)
    normalise(gm)
    assert len(env.guards) == before
    assert "clone.default" not in calls(gm) and "view.default" not in calls(gm)


def test_decompositions_leave_native_and_kept_ops() -> None:
    bare = decompositions(frozenset())
    assert aten.gelu_backward.default in bare
    assert aten.gelu_backward.default not in decompositions(frozenset({"aten.gelu_backward"}))
    one = decompositions(frozenset({"aten.std.correction"}))
    assert aten.std.correction not in one and aten.std_mean.correction in one
    kept = {aten.convolution.default, aten.convolution_backward.default}  # but not of a bias
    assert {op for op in bare if has(op, "library")} == kept


def test_origin_is_the_users_line() -> None:
    with FakeTensorMode():
        x = torch.empty(3)
    graph = torch.fx.Graph()
    node = graph.call_function(aten.sin.default, (graph.placeholder("x"),))
    assert origin(node) == ""
    node.meta["val"] = x
    node.meta["stack_trace"] = '  File "a.py", line 3, in f\n    g()\n  File "b.py", line 7, in g\n'
    assert origin(node) == "b.py:7"
