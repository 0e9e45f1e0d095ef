"""A half from AOTAutograd -> `FxProgram`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._guards import TracingContext, detect_fake_mode
from torch._library.opaque_object import is_opaque_value_type
from torch._ops import HigherOrderOperator as HOP
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree

from lenz.frontend.calls import storages
from lenz.frontend.constants import fold_known
from lenz.frontend.expand import expand
from lenz.frontend.kernels import bind_kernels
from lenz.frontend.normalise import multiply_in_pairs, normalise, written_by
from lenz.frontend.program import FxProgram, GraphKind, Output, Placeholder, ValueKind
from lenz.frontend.rebase import is_apart, rebase, returned_of, told_of
from lenz.frontend.refusals import mark_refused
from lenz.frontend.restride import restride
from lenz.frontend.symbols import SymbolMap
from lenz.frontend.values import storage_of
from lenz.frontend.wide import assert_divisors, assert_integers

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

KINDS: Sequence[tuple[Any, ValueKind]] = (
    (torch.Tensor, "tensor"), (torch.SymInt, "symint"), (torch.SymFloat, "symfloat"),
    ((bool, int, float, complex), "scalar"), (type(None), "none"),
)  # fmt: skip


def build(
    gm: GraphModule,
    inputs: Sequence[Any],
    kind: GraphKind,
    name: str,
    static_names: frozenset[str] = frozenset(),
    ended_by: str = "",
    native: frozenset[str] = frozenset(),
    donated: frozenset[int] = frozenset(),
) -> FxProgram:
    """Normalise `gm` in place and collect the facts about it.

    `inputs` are the fake arguments that AOTAutograd compiled for; `static_names` names the
    placeholders that are static in an earlier half of the same graph; `ended_by` says why Dynamo's
    graph ended where it does; `native` names the ops that have a lowering; `donated` are the
    positions of arguments that the graph may overwrite when nothing else holds them.
    """
    context = TracingContext.try_get()
    is_first = kind in ("inference", "forward")  # the context's results belong to these
    metadata = context.fw_metadata if context is not None and is_first else None
    multiply_in_pairs(gm.graph)
    assert_integers(gm, kind)
    assert_divisors(gm.graph)
    if kind == "inference":
        rebase(gm.graph, metadata)
    traced = [n.meta.get("val") if isinstance(n, Node) else n for n in returned_of(gm.graph)]
    restride(gm, inputs if kind == "backward" else (), expand(gm, native))
    normalise(gm)
    fold_known(gm, native)
    mark_refused(gm)
    bind_kernels(gm)
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    static_names |= static_of(places, kind, metadata)
    placeholders = placeholders_of(places, inputs, static_names, donated)
    mode = detect_fake_mode(list(inputs) + [p.value for p in placeholders])
    symbols = SymbolMap(mode.shape_env if mode is not None else None)
    symbols.bind(tuple(p.value for p in placeholders), is_first)
    name_objects(gm)
    constants, modules = attributes_of(gm)
    outputs = outputs_of(gm.graph, placeholders, symbols, traced)
    told = told_of(gm.graph, metadata) if kind == "forward" else {}
    return FxProgram(
        name=name,
        kind=kind,
        gm=gm,
        placeholders=placeholders,
        outputs=outputs,
        mutated=mutated_of(gm.graph, places),
        constants=constants,
        modules=modules,
        symbols=symbols,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        guards=guards_so_far(context, mode.shape_env if mode is not None else None),
        ended_by="" if kind == "backward" else ended_by,
        saved=saved_of(outputs, metadata) if kind == "forward" else (),
        apart=tuple(k for k in told if is_apart(told[k], outputs[k])),
    )


def static_of(
    places: Sequence[Node], kind: GraphKind, metadata: ViewAndMutationMeta | None
) -> frozenset[str]:
    """Return the names of arguments that keep their addresses: parameters and saved tensors."""
    static = (metadata.static_input_indices or ()) if metadata is not None else ()
    # AOTAutograd's primals are arguments of the forward half, tangents the given gradients.
    moving = ("primals_", "tangents_") if kind == "backward" else ("",)
    fixed = (i in static or not n.name.startswith(moving) for i, n in enumerate(places))
    return frozenset(n.name for n, is_fixed in zip(places, fixed, strict=True) if is_fixed)


def saved_of(outputs: Sequence[Output], metadata: ViewAndMutationMeta | None) -> tuple[int, ...]:
    """Return the positions of fresh tensors saved only for the backward half."""
    if metadata is None:
        return ()
    places = range(len(outputs))[metadata.tensors_saved_for_backwards_slice]
    return tuple(k for k in places if outputs[k].alias_input is None)


def guards_so_far(context: TracingContext | None, env: ShapeEnv | None) -> int:
    """Return the number of guards of Dynamo and ShapeEnv for the function being compiled."""
    dynamo = len(context.guards_context.dynamo_guards) if context is not None else 0
    return dynamo + (len(env.guards) if env is not None else 0)


def placeholders_of(
    places: Sequence[Node], inputs: Sequence[Any], static_names: frozenset[str],
    donated: frozenset[int],
) -> tuple[Placeholder, ...]:  # fmt: skip
    """Describe the arguments, in order."""
    found = []
    for i, node in enumerate(places):
        value = node.meta["val"] if "val" in node.meta else inputs[i]
        is_static = node.name in static_names
        kind: ValueKind = next((k for types, k in KINDS if isinstance(value, types)), "object")
        label = node.meta["desc"].expr() if hasattr(node.meta.get("desc"), "expr") else node.name
        found.append(Placeholder(node.name, kind, value, is_static, label, i in donated))
    return tuple(found)


def name_objects(gm: GraphModule) -> None:
    """Make object arguments of custom and higher-order ops attributes of the graph, like bodies."""
    for node in gm.graph.nodes:
        if getattr(node.target, "namespace", "aten") in ("aten", "prims"):
            continue
        leaves, spec = _pytree.tree_flatten((node.args, node.kwargs))
        types = [*map(type, leaves)]
        found = [k for k, t in enumerate(types) if issubclass(t, HOP) or is_opaque_value_type(t)]
        for k in found:
            name = f"{node.name}_object{k}"
            setattr(gm, name, leaves[k])
            with gm.graph.inserting_before(node):
                leaves[k] = gm.graph.create_node("get_attr", name)
        if found:
            node.args, node.kwargs = _pytree.tree_unflatten(leaves, spec)


def attributes_of(gm: GraphModule) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    """Return the tensors and the other objects that `get_attr` nodes name, by first use."""
    found = {n.target: attrgetter(n.target)(gm) for n in gm.graph.find_nodes(op="get_attr")}
    constants = {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}
    modules = {name: x for name, x in found.items() if name not in constants}
    return MappingProxyType(constants), MappingProxyType(modules)


def mutated_of(graph: Graph, places: Sequence[Node]) -> tuple[int, ...]:
    """Return the positions of the arguments whose storage the graph writes into."""
    nodes = dict.fromkeys(n for call in graph.nodes for n in written_by(call))
    keys = {*storages(*nodes)}
    return tuple(i for i, p in enumerate(places) if p in nodes or not keys.isdisjoint(storages(p)))


def outputs_of(
    graph: Graph, placeholders: Sequence[Placeholder], symbols: SymbolMap, traced: Sequence[Any]
) -> tuple[Output, ...]:
    """Describe the results, in order, with the strides of the values that were `traced`."""
    # The first argument of each storage.
    owners = {storage_of(p.value): i for i, p in reversed([*enumerate(placeholders)])}
    owners.pop(None, None)  # arguments without memory
    found: list[Output] = []
    for node, told in zip(returned_of(graph), traced, strict=True):
        value = node.meta.get("val") if isinstance(node, Node) else node
        sizes = ((), ()) if storage_of(told) is None else (told.shape, told.stride())
        shape, stride = map(symbols.syms, sizes)
        owner = owners.get(storage_of(value))
        found.append(Output(node if isinstance(node, Node) else None, value, shape, stride, owner))
    return tuple(found)
