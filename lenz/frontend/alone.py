"""Graphs compiled outside Dynamo, and the facts known about their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule

from lenz.frontend.symbols import ends


def traced_context(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """The tracing context of fake arguments; torch provides one when it calls a backend."""
    mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
    if mode is None or TracingContext.try_get() is not None:
        return nullcontext()
    return tracing(TracingContext(mode))


def listed(gm: GraphModule) -> GraphModule:
    """A copy of a graph that returns a tuple."""
    graph = Graph()
    result = graph.graph_copy(gm.graph, {})
    graph.output(tuple(result) if isinstance(result, (tuple, list)) else (result,))
    for n, old in zip(graph.nodes, gm.graph.nodes, strict=True):
        n.meta = dict(old.meta)
    return GraphModule(gm, graph)


def traced_inputs(gm: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The arguments as Dynamo traced them, with symbolic sizes, or unchanged."""
    holes = gm.graph.find_nodes(op="placeholder")
    return [n.meta.get("example_value", x) for n, x in zip(holes, inputs, strict=True)]


def ends_of(n: int | torch.SymInt, ranges: Mapping[Any, Any]) -> list[int | None]:
    """The lower and upper bound of a size; None where it is unbounded.

    `ranges` are the user's, by expression.
    """
    if isinstance(n, int):
        return [n, n]
    named = ranges.get(n.node.expr)
    return [*ends(n.node.shape_env.bound_sympy(n.node.expr) if named is None else named)]
