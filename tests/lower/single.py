"""Run the lowering of one op by itself, for ops that tracing on CPU takes apart or never gives."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from lenz.ir.graph import Extern, Graph
from lenz.ir.interp import interp
from tests.lower import harness


def single(op: Any, *args: Any) -> Graph:
    """The graph of one call op(*args), with every result as an output."""
    return _lowered(op, args)[0]


def outputs_of(op: Any, *args: Any) -> tuple[Any, ...]:
    """What the lowering of op(*args) computes; asserts that it is native."""
    g, tensors = _lowered(op, args)
    assert not [n for n in g.nodes if isinstance(n, Extern)]
    return interp(g, tensors).outputs


def _lowered(op: Any, args: tuple[Any, ...]) -> tuple[Graph, list[torch.Tensor]]:
    fx = FxGraph()
    tensors: list[Any] = []
    given: list[Any] = []
    fakes: list[Any] = []
    mode = FakeTensorMode()
    for a in args:
        if isinstance(a, torch.Tensor):
            node = fx.placeholder(f"x{len(tensors)}")
            node.meta["val"] = mode.from_tensor(a)
            tensors.append(a)
            given.append(node)
            fakes.append(node.meta["val"])
        else:
            given.append(a)
            fakes.append(a)
    call = fx.call_function(op, tuple(given))
    # Tracing by the fake tensors of the meta device: no op is taken apart on the way.
    with mode:
        call.meta["val"] = value = op(*fakes)
    if isinstance(value, (tuple, list)):
        parts = []
        for k, v in enumerate(value):
            part = fx.call_function(operator.getitem, (call, k))
            part.meta["val"] = v
            parts.append(part if v is not None else None)
        fx.output(tuple(parts))
    else:
        fx.output((call,))
    gm = GraphModule(torch.nn.Module(), fx)
    return harness._lower(gm, tensors)[0], tensors
