"""Calls of eager ops that have no lowering, with values, aliases and mutation as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node as FxNode

from lenz.errors import Unsupported
from lenz.ir.graph import Atom, Draws, Extern, Named, Ref, View, atom_refs, held_by
from lenz.ir.tensor import TensorType, contiguous
from lenz.lower.builder import GraphBuilder, Value, maker
from lenz.sym import ZERO, Sym, Var
from lenz.traits import arguments, has, is_random

ToAtom = Callable[[Any], Atom]
# Functions that the runtime evaluates, since conditions on sizes are data here.
OWN = {"aten._assert_scalar.default": "lenz.assert_scalar"}
# Namespaces whose ops are done with their arguments when they return, unless they give them away.
KNOWN = frozenset({"aten", "prims", "lenz", "py"})
WAIT = ("_c10d_functional.wait_tensor.default", "c10d_functional.wait_tensor.default")


def op_name(target: Any) -> str:
    """Qualified name under torch.ops ("aten.mm.default"), or of a function in torch or operator."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"  # type: ignore[no-untyped-call]  # torch is untyped here
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", "")
    if module in ("_operator", "operator", "torch", "math") and name:
        return f"py.{module.lstrip('_')}.{name}"
    if target is round:
        return "lenz.round"
    raise Unsupported(f"a call of {target!r}")


def call_eager(
    b: GraphBuilder, n: FxNode, atom: ToAtom, val: Any, to_sym: Callable[[Any], Sym], reason: str
) -> Any:
    """Add the call of the FX node to the graph; returns its result (Value, Sym, tuple)."""
    name = op_name(n.target)
    name = OWN.get(name, name)
    single = not isinstance(val, (tuple, list))
    parts = (val,) if single else tuple(val)
    mutates, aliases = effects(n)
    given = tuple(atom(a) for a in n.args)
    outs: list[TensorType | Sym | None] = []
    for part, result in zip(parts, b.results, strict=True):
        if isinstance(part, (list, tuple)):
            raise Unsupported(f"{name} gives a {type(part).__name__}")
        if isinstance(part, torch.SymFloat) or is_object(part):
            outs.append(Var(f"{n.name}_value"))
        else:
            outs.append(to_sym(part) if isinstance(part, torch.SymInt) else result)
    made = b.extern(
        name,
        given,
        tuple((k, atom(a)) for k, a in n.kwargs.items()),
        outs=tuple(outs),
        single=single,
        mutates=tuple(getattr(atom(a), "name", "") for a in mutates),
        aliases=tuple((i, getattr(atom(a), "name", "")) for i, a in aliases),
        reason="library" if has(name, "library") else reason,
        holds=has(name, "gives") or (name.partition(".")[0] not in KNOWN and name not in WAIT),
        waits=waited(b, given[0]) if name in WAIT else (),
        draws=drawn(n),
        # What has no elements is not read, but eager still checks its types.
        refuses="refused" in n.meta
        or all(isinstance(o, TensorType) and ZERO in o.shape for o in outs),
    )
    return made[0] if single else made


def drawn(n: FxNode) -> Draws:
    """Say which generators a call draws from. Higher-order ops are unknown and may draw.

    Attention without dropout draws nothing.
    """
    if not is_random(n.target):
        return "numbers" if isinstance(n.target, torch._ops.HigherOrderOperator) else ""
    is_without = any(a.name == "dropout_p" and given == 0 for a, given in arguments(n))
    return "" if is_without else "numbers"


def is_object(val: Any) -> bool:
    """Say whether a value is only passed on: a device mesh, a process group, a test of sizes.

    It becomes a variable, like a size, but nothing is computed with it.
    """
    numbers = (int, float, complex, torch.SymInt, torch.SymFloat)
    return val is not None and not isinstance(val, (torch.Tensor, *numbers))


def waited(b: GraphBuilder, a: Atom) -> tuple[str, ...]:
    """The arguments held by the collective whose result is waited for; any argument if unknown."""
    (name,) = atom_refs(a)
    n = maker(b, name)
    while isinstance(n, View):
        n = maker(b, n.source)
    found: Iterable[str] = ()
    if n is None:
        found = b.given
    elif isinstance(n, Extern):
        found = held_by(n) or n.waits
    return tuple(dict.fromkeys((name, *found)))


def move(b: GraphBuilder, x: Value, device: str) -> Value:
    """A contiguous copy of `x` on another device: a call of the runtime's `to_device`."""
    out = b.define(f"{x.name}_moved", TensorType(x.dtype, device, contiguous(x.shape)))
    given = Ref(x.name), Named("device", device)
    b.nodes.append(Extern((out,), "lenz.to_device", given, reason="library"))
    return Value(out)


def untold(n: FxNode) -> list[tuple[int, Any]]:
    """Results of collectives that alias arguments, although their schemas do not say so."""
    match str(n.target).removeprefix("_").removeprefix("c10d_functional."):
        case "wait_tensor.default" | "irecv.default":
            return [(0, n.args[0])]
        case "batch_p2p_ops.default":
            kinds, _, _, tensors, _ = n.args
            pairs: Any = enumerate(zip(kinds, tensors, strict=True))  # type: ignore[arg-type]  # lists
            return [(k, t) for k, (kind, t) in pairs if kind == "irecv"]
    return []


def effects(n: FxNode) -> tuple[tuple[FxNode, ...], tuple[tuple[int, FxNode], ...]]:
    """The arguments that the op writes, by its schema, and results that may alias arguments."""
    val = n.meta.get("val")
    count = len(val) if isinstance(val, (list, tuple)) else 1
    if isinstance(n.target, torch._ops.HigherOrderOperator):
        # Without a schema any result may alias: a loop of no rounds returns its arguments.
        given = [a for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
        return (), tuple((i, a) for i in range(count) for a in given)
    if not isinstance(n.target, torch._ops.OpOverload):
        return (), ()
    returns = n.target._schema.returns
    mutates: list[FxNode] = []
    aliases = [(k, a) for k, a in untold(n) if isinstance(a, FxNode)]
    for formal, actual in arguments(n):
        info = formal.alias_info
        if info is None:
            continue
        for t in actual if isinstance(actual, (list, tuple)) else (actual,):
            if not isinstance(t, FxNode):
                continue
            if info.is_write:
                mutates.append(t)
            for i, r in enumerate(returns):
                if r.alias_info is not None and r.alias_info.before_set & info.before_set:
                    # One list in the schema stands for all its tensors.
                    places = range(count) if len(returns) == 1 else (i,)
                    aliases.extend((k, t) for k in places)
    return tuple(mutates), tuple(aliases)
