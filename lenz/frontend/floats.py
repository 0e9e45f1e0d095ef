"""Specialises floats before the trace, where torch would only do so after it.

With dynamic shapes Dynamo turns a Python float of the program into a 0-d tensor and its `item()`.
An op may need a true float, such as the epsilon of a layer norm.  AOTAutograd then traces the whole
graph, specialises the float, and makes Dynamo start again: everything is traced twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.source import CallMethodItemSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.utils._sympy.symbol import SymT, symbol_is_type

from lenz.frontend.values import added

# Functions whose float arguments have the schema type `float`, which takes no SymFloat: tracing
# reads their value and guards on it.
FIXING = (
    F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.instance_norm, F.normalize, F.dropout,
    F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.embedding, F.embedding_bag,
    F.scaled_dot_product_attention, torch.layer_norm, torch.rms_norm, torch.group_norm,
    torch.batch_norm, torch.instance_norm, torch.dropout,
)  # fmt: skip
FLEX = torch.ops.higher_order.flex_attention
# Functions where a float stays symbolic: torch turns them into arithmetic of 0-d tensors.
KEEPING = (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)


def fix_floats(gm: GraphModule) -> None:
    """Ask Dynamo, before the trace, for constants where an op of the graph needs them.

    If it finds one, it raises TensorifyScalarRestartAnalysis, which makes Dynamo restart. Captures
    of score functions must be constant: they are not traced a second time. Otherwise it does
    nothing if the graph leaves the fate of any float open: a second restart would cost more than
    this one saves.
    """
    names, kept = list[str](), tensor_symbols()
    for node in gm.graph.nodes:
        name = float_symbol(node)
        if not name or name in kept or TensorifyState.should_specialize(name):
            continue
        if all(calls(u, FIXING) for u in node.users):
            names.append(name)
        elif not all(calls(u, KEEPING) for u in node.users):
            names = []
            break
    names += [s for n in gm.graph.nodes if n.target is FLEX for s in captured(gm, n)]
    if names:
        for name in names:
            TensorifyState.specialize(name)
        raise TensorifyScalarRestartAnalysis


def kept_tensors() -> AbstractContextManager[None]:
    """Keep AOTAutograd from specialising `tensor_symbols`, for which it would restart Dynamo.

    Dynamo would then drop writes into these tensors: docs/upstream/torch_lost_writes.py. The
    context ends before Dynamo may start again for another float.
    """
    return added(tensor_symbols(), TensorifyState.force_specializations)


def tensor_symbols() -> set[str]:
    """Return the float symbols of 0-d float64 arguments on CPUs: torch makes one for each.

    Those of the program's own floats have another source.
    """
    mode = detect_fake_mode()
    env = mode.shape_env if mode is not None else None
    sources = env.var_to_sources.items() if env is not None else ()
    return {str(v) for v, of in sources if any(isinstance(s, CallMethodItemSource) for s in of)}


def captured(gm: GraphModule, n: Node) -> list[str]:
    """Return the symbols of floats that a score function captures."""
    bodies = [gm.get_submodule(str(a.target)) for a in n.all_input_nodes if a.op == "get_attr"]
    nodes = (m for b in bodies if isinstance(b, GraphModule) for m in b.graph.nodes)
    return [s for s in map(float_symbol, nodes) if s and not TensorifyState.should_specialize(s)]


def float_symbol(node: Node) -> str:
    """Return the symbol of the Python float at `node` of Dynamo's graph; empty if it is none."""
    value = node.meta.get("example_value")
    if node.op != "call_method" or node.target != "item" or not isinstance(value, torch.SymFloat):
        return ""
    # Not `expr`: it already has the constant once something has read the value.
    symbol = value.node._expr
    return str(symbol) if symbol.is_Symbol and symbol_is_type(symbol, SymT.FLOAT) else ""


def calls(user: Node, functions: tuple[Callable[..., Any], ...]) -> bool:
    return user.op == "call_function" and user.target in functions
