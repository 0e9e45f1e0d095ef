"""Graphs compiled outside Dynamo, and the facts known about their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule

from lenz.errors import UserError
from lenz.frontend.symbols import ends

# Functions of sympy and torch as `runtime.executor.size` calls them.
FUNCTIONS: Mapping[str, str] = {
    "Equality": "eq", "Unequality": "ne", "StrictLessThan": "lt", "LessThan": "le",
    "StrictGreaterThan": "gt", "GreaterThan": "ge", "And": "and_", "Or": "or_",
    "Add": "add", "Mul": "mul", "Pow": "pow", "PowByNatural": "pow", "FloorDiv": "floordiv",
    "CleanDiv": "floordiv", "Mod": "mod", "PythonMod": "mod", "Max": "sym_max", "Min": "sym_min",
    "Not": "not_", "IntTrueDiv": "truediv", "FloatTrueDiv": "truediv", "ToFloat": "sym_float",
    "TruncToInt": "sym_int", "FloorToInt": "floordiv", "CeilToInt": "floordiv",
}  # fmt: skip


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


def assumed(values: Sequence[Any], called: Sequence[str], is_alone: bool) -> list[tuple[Any, str]]:
    """The guards of a traced graph on the sizes of its arguments, and their texts.

    A condition is a number, a place, or a list [name of a function, *conditions]. The place [k, d]
    is size d of argument k, and [k] the argument itself. Unless the graph `is_alone`, guards on
    other sizes are the caller's. Raises UserError for a guard that no list holds.
    """
    places: dict[Any, tuple[Any, Any]] = {}
    env: Any = None
    for k, v in enumerate(values):
        for d, n in enumerate(v.shape) if isinstance(v, torch.Tensor) else [(None, v)]:
            if isinstance(n, torch.SymInt) and hasattr(n.node, "expr"):
                env = n.node.shape_env
                (offset, rest), name = n.node.expr.as_coeff_Add(), f"argument {called[k]}"
                factor, symbol = rest.as_coeff_Mul()
                whole = [[k], offset, factor] if d is None else [[k, d], offset, factor]
                if symbol.is_Symbol and offset.is_Integer and factor.is_Integer:
                    places.setdefault(symbol, (whole, name if d is None else f"size {d} of {name}"))
    found = []
    for e in dict.fromkeys(env.replace(g.expr) for g in ([] if env is None else env.guards)):
        if e.free_symbols and (is_alone or e.free_symbols <= places.keys()):
            try:
                named = {s: s.func(places[s][1]) for s in e.free_symbols}
                found.append((_listed(e, places), str(e.xreplace(named))))
            except (KeyError, ValueError):
                raise UserError(f"a file cannot hold the assumption {e} on sizes") from None
    return found


def _listed(e: Any, places: Mapping[Any, tuple[Any, Any]]) -> Any:
    if e.is_Symbol:
        place, offset, factor = places[e][0]
        return ["floordiv", ["sub", place, int(offset)], int(factor)]
    if e.is_number:
        return int(e) if e.is_Integer else float(e)
    name = type(e).__name__
    function, (first, *rest) = FUNCTIONS[name], (_listed(a, places) for a in e.args)
    if name in ("FloorToInt", "CeilToInt"):
        sign = 1 if name == "FloorToInt" else -1
        return ["sym_int", ["mul", sign, ["floordiv", ["mul", sign, first], 1]]]
    if not rest:
        return [function, first]
    return reduce(lambda x, y: [function, x, y], rest, first)
