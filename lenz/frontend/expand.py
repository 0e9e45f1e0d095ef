"""Operators defined by a Python function of aten ops: traced and inlined.

    flex_attention(q, k, v, score_mod, block_mask, ...)   ==>   two matrix products, and between
        them loops that compute the scores, the user's score function, the mask and the softmax

Eager runs the same functions; those of `parts` are our own.  In a training step they are traced
after partitioning, so that the backward half recomputes the scores and none are saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo._trace_wrapped_higher_order_op  # it defines SCATTER
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from lenz.debug.blame import blaming
from lenz.frontend.calls import inserter
from lenz.frontend.decompose import decompositions
from lenz.frontend.parts import PARTS
from lenz.frontend.refusals import is_refused
from lenz.frontend.values import is_same_layout, unguarded

aten = torch.ops.aten
EXPANDED = ("flex_attention", "flex_attention_backward", "associative_scan")
EAGER = torch._C.DispatchKey.CompositeExplicitAutograd
SCATTER = torch.ops.flex_lib.zeros_and_scatter.default  # the gradient of an indexed tensor


def expand(gm: GraphModule, native: frozenset[str]) -> set[Node]:
    """Replace calls of `EXPANDED` and `PARTS` by their traced functions.

    `native` is as for `decompositions`.  Return the results whose type differs from the traced one:
    the log-sum-exp of f64 is not f32.
    """
    changed: set[Node] = set()
    for n in gm.graph.nodes:
        with blaming(n):
            if (run := _function_of(n)) is not None:
                given, traced = _traced(gm, n, run, native)
                if traced.graph.output_node().args[0] is not None:
                    _give(n, _inlined(gm, n, given, traced), changed)
    return changed


def _function_of(n: Node) -> Callable[..., Any] | None:
    """Return the function that defines an operator, unless eager may reject the call."""
    if isinstance(n.target, HigherOrderOperator) and n.target.__name__ in EXPANDED:
        return n.target.py_kernels[EAGER]
    op: Any = n.target
    if op not in PARTS:
        return None
    given = map_arg((n.args, n.kwargs), lambda a: a.meta["val"])
    return None if is_refused(op.overloadpacket.__name__, *given) else PARTS[op]


def _traced(
    gm: GraphModule, n: Node, run: Callable[..., Any], native: frozenset[str]
) -> tuple[list[Node], GraphModule]:
    """Return the nodes that a call reads, and the graph of its function of these nodes."""
    taken = [a for a in n.all_input_nodes if a.op != "get_attr" or "val" in a.meta]

    def call(*values: Any) -> Any:
        held = dict(zip(taken, values, strict=True))

        def known(a: Node) -> Any:
            return held[a] if a in held else operator.attrgetter(str(a.target))(gm)

        args, kwargs = map_arg((n.args, n.kwargs), known)
        return run(*args, **kwargs)

    values = [a.meta["val"] for a in taken]
    wanting = _wanting(gm, n)
    mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
    around = unguarded(mode) if n.target in PARTS else mode
    with around, torch.no_grad():  # the backward function reads which tensors need a gradient
        values = [
            v.detach().requires_grad_(a in wanting) if isinstance(v, Tensor) else v
            for a, v in zip(taken, values, strict=True)
        ]
        return taken, make_fx(call, {**decompositions(native), SCATTER: _scattered})(*values)


def _wanting(gm: GraphModule, n: Node) -> list[Any]:
    """Return the captures of a score function for which its joint graph has a gradient."""
    if n.target is not torch.ops.higher_order.flex_attention_backward:
        return []
    args: Any = n.args
    joint, captured = getattr(gm, args[8].target), args[12]
    gradients = joint.graph.output_node().args[0][5:]  # after those of the score and its indices
    return [a for a, g in zip(captured, gradients, strict=True) if g is not None]


def _scattered(shape: Sequence[Any], indices: Sequence[Tensor], values: Tensor) -> Tensor:
    return values.new_zeros(shape).index_put(tuple(indices), values, accumulate=True)


def _inlined(gm: GraphModule, n: Node, given: list[Node], traced: GraphModule) -> Any:
    """Insert the calls of `traced` before `n`; return the replacement of its result."""
    places = traced.graph.find_nodes(op="placeholder")
    copies: dict[Node, Any] = dict(zip(places, given, strict=True))
    with gm.graph.inserting_before(n):
        for m in traced.graph.nodes:
            if m.op == "get_attr":
                name = f"{n.name}_{m.target}"
                setattr(gm, name, getattr(traced, str(m.target)))
                copies[m] = gm.graph.create_node("get_attr", name)
                copies[m].meta = {**m.meta}
            elif m.target is aten._to_copy.default and not isinstance(m.args[0], Node):
                copies[m] = _number(gm, n, m, given[0].meta["val"].device)
            elif m.op == "call_function":
                copies[m] = gm.graph.node_copy(m, copies.__getitem__)
                copies[m].meta = {**n.meta, **m.meta, "stack_trace": n.meta.get("stack_trace")}
                if m.target is aten.copy_.default:  # into memory made for it
                    copies[m].target = aten.copy.default
                    copies[m.args[0]] = copies[m]
    return map_arg(traced.graph.output_node().args[0], copies.__getitem__)


def _number(gm: GraphModule, n: Node, m: Node, device: torch.device) -> Node:
    """Insert the result of `m`, the conversion of a Python number: vmap promotes `index * 0.01` so.

    There it is a CPU tensor, here one on the device of `n`.
    """
    call, dtype = inserter(gm.graph, n), m.meta["val"].dtype
    with m.meta["val"].fake_mode:
        return call(aten.full.default, [], m.args[0], dtype=dtype, device=device)


def _give(n: Node, result: Any, changed: set[Node]) -> None:
    """Make the readers of `n`, or of its parts, read `result`, and drop `n`."""
    if isinstance(result, Node):
        if not is_same_layout(n.meta["val"], result.meta["val"], offset=False):
            changed.add(result)
        n.replace_all_uses_with(result)
    elif result is not None:
        for u in tuple(n.users):
            _give(u, result[u.args[1]], changed)
    n.graph.erase_node(n)
