"""Specialises floats before the trace, where torch would only do so after it.

With dynamic shapes Dynamo turns a Python float of the program into a 0-d tensor and its `item()`.
An op may need a true float, such as the epsilon of a layer norm.  AOTAutograd then traces the whole
graph, specialises the float, and makes Dynamo start again, only to drop the 0-d tensor from the
arguments: everything is traced twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.pgo import auto_dynamic, get_code_state
from torch._dynamo.source import CallMethodItemSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.utils._sympy.symbol import SymT, symbol_is_type

from lenz.frontend.saved import is_asked
from lenz.frontend.values import added

T = TypeVar("T")

# Functions whose float arguments have the schema type `float`, which takes no SymFloat: tracing
# reads their value and guards on it.
FIXING = (
    F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.instance_norm, F.normalize, F.dropout,
    F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.embedding, F.embedding_bag,
    F.scaled_dot_product_attention, torch.layer_norm, torch.rms_norm, torch.group_norm,
    torch.batch_norm, torch.instance_norm, torch.dropout,
)  # fmt: skip
FLEX = torch.ops.higher_order.flex_attention


def fix_floats(gm: GraphModule, inputs: list[Any]) -> None:
    """Make constants of floats where an op of the graph needs them, before AOTAutograd does.

    Those that modules hold are constants too: as arguments, the epsilons of 32 norms take 0.17
    ms of each call. Captures of score functions must be: they are not traced a second time. Raises
    TensorifyScalarRestartAnalysis if Dynamo has to start again.
    """
    if not isinstance(gm, GraphModule) or not _sources():
        return
    kept, held = tensor_symbols(), held_symbols() if may_drop(gm) else set()
    found = ((float_symbol(n), n.users) for n in gm.graph.nodes)
    found = ((s, users) for s, users in found if s and s not in kept)
    names = [s for s, users in found if s in held or all(calls(u) for u in users)]
    names += [s for n in gm.graph.nodes if n.target is FLEX for s in captured(gm, n)]
    if new := [name for name in names if not TensorifyState.should_specialize(name)]:
        for name in new:
            TensorifyState.specialize(name)
        drop_floats(gm, inputs)


def drop_floats(gm: GraphModule, inputs: list[Any], places: Sequence[int] = ()) -> list[int]:
    """Drop the floats that are constants from the arguments of Dynamo's graph, and from `inputs`.

    They are those that AOTAutograd or `places` asks for; returns the places of all. Dynamo would
    trace the program again to the same graph, only to do this. It reads the arguments once the
    graph is compiled, so that they can be dropped before. Raises TensorifyScalarRestartAnalysis
    if the graph is not lenz's to change, or has bodies: what AOTAutograd knows of them would stay.
    """
    floats = float_arguments(gm)
    for k, n in floats.items():
        if k in places or n.meta["example_value"].node.expr.is_number:  # a trace has read it
            TensorifyState.specialize(float_symbol(n))
    found = [k for k, n in floats.items() if TensorifyState.should_specialize(float_symbol(n))]
    if not found or not may_drop(gm):
        raise TensorifyScalarRestartAnalysis
    holes = gm.graph.find_nodes(op="placeholder")
    for k in reversed(found):
        for n in list(holes[k].users):
            n.replace_all_uses_with(guard_scalar(n.meta["example_value"]))
            gm.graph.erase_node(n)
        gm.graph.erase_node(holes[k])
        del inputs[k]
        # Another compilation may want it as an argument: torch would remember the symbol.
        TensorifyState.force_specializations.discard(float_symbol(floats[k]))
    gm.recompile()
    context = TracingContext.get()
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        # The fake arguments may be as the first trace has left them.
        context.fake_mode = FakeTensorMode(shape_env=getattr(context.fake_mode, "shape_env", None))
    return found


def without_floats(
    gm: GraphModule, inputs: list[Any], trace: Callable[[], T]
) -> tuple[T, list[list[int]]]:
    """Run `trace` until AOTAutograd asks for no more constants.

    Returns its result, and the places of the floats that were dropped each time.
    """
    dropped = list[list[int]]()
    while True:
        try:
            return trace(), dropped
        except TensorifyScalarRestartAnalysis:
            dropped.append(drop_floats(gm, inputs))


def may_drop(gm: GraphModule) -> bool:
    """Say whether the graph is lenz's to change, and has no bodies.

    It is if Dynamo compiles it now, and for lenz: another backend that calls lenz keeps the graph
    that it was given. `aot_compile` has no other use for it.
    """
    if any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in gm.graph.nodes):
        return False
    tx = getattr(symbolic_convert.tls, "current_tx", None)
    if is_asked() or tx is None or tx.output.graph is not gm.graph:
        return is_asked()
    given = getattr(tx.output.compiler_fn, "_torchdynamo_orig_backend", tx.output.compiler_fn)
    given = getattr(given, "compiler_fn", given)  # torch.compile's wrapper around a backend
    return str(getattr(given, "__module__", "")).split(".")[0] == "lenz"


def float_arguments(gm: GraphModule) -> dict[int, Node]:
    """The `item()` of each argument of Dynamo's graph that is only a float, by its place."""
    others = {"", *tensor_symbols()}
    found = {k: list(n.users) for k, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    return {k: u[0] for k, u in found.items() if u and others.isdisjoint(map(float_symbol, u))}


def not_again(gm: GraphModule) -> AbstractContextManager[None]:
    """Keep AOTAutograd from having Dynamo start again for symbols that are no floats of the graph.

    They are those of dropped arguments, and `tensor_symbols`: for these Dynamo would drop writes
    into tensors: docs/upstream/torch_lost_writes.py. The context ends before Dynamo may start
    again for another float.
    """
    names = {name for name, _ in _sources()}
    graphs = [m.graph for m in gm.modules() if isinstance(m, GraphModule)] if names else []
    used = {float_symbol(n) for g in graphs for n in g.nodes} - tensor_symbols()
    return added(names - used, TensorifyState.force_specializations)


def tensor_symbols() -> set[str]:
    """Return the float symbols of 0-d float64 arguments on CPUs: torch makes one for each.

    Those of the program's own floats have another source.
    """
    return {name for name, s in _sources() if isinstance(s, CallMethodItemSource)}


def held_symbols() -> set[str]:
    """Return the symbols of floats that modules hold, and that have not changed so far.

    A change breaks a guard, and Dynamo compiles again, with an argument that may change.
    """
    of_modules = [(n, s) for n, s in _sources() if s.guard_source.is_unspecialized_nn_module()]
    states = (s.automatic_dynamic.items() for s in get_code_state().values()) if of_modules else ()
    changed = {name for pairs in states for name, e in pairs if e.scalar is auto_dynamic}
    return {n for n, s in of_modules if (s.name() if callable(s.name) else s.name) not in changed}


def _sources() -> list[tuple[str, Any]]:
    """Return each symbol of a float with each source of it."""
    mode = detect_fake_mode()
    env = mode.shape_env if mode is not None else None
    found = env.var_to_sources.items() if env is not None else ()
    return [(str(v), s) for v, of in found if symbol_is_type(v, SymT.FLOAT) for s in of]


def captured(gm: GraphModule, n: Node) -> list[str]:
    """Return the symbols of floats that a score function captures."""
    bodies = [gm.get_submodule(str(a.target)) for a in n.all_input_nodes if a.op == "get_attr"]
    nodes = (m for b in bodies if isinstance(b, GraphModule) for m in b.graph.nodes)
    return list(filter(None, map(float_symbol, nodes)))


def float_symbol(node: Node) -> str:
    """Return the symbol of the Python float at `node` of Dynamo's graph; empty if it is none."""
    value = node.meta.get("example_value")
    if node.op != "call_method" or node.target != "item" or not isinstance(value, torch.SymFloat):
        return ""
    # Not `expr`: it already has the constant once something has read the value.
    symbol = value.node._expr
    return str(symbol) if symbol.is_Symbol and symbol_is_type(symbol, SymT.FLOAT) else ""


def calls(user: Node) -> bool:
    return user.op == "call_function" and user.target in FIXING
