"""Calls of the user's Triton kernels and custom ops, with the arguments that they write.

    %r = call: `kernel` on copies of the tensors that it writes; gives the copies
    ==>  %c = map { load(%x, [i]) };  %r = call lenz.user_kernel(..., %c, ...) mutates (%c)

For a custom op, torch's call makes the copies, of whole tensors of which the op writes views. It is
told to make none.

There is no copy if nobody reads the original afterwards: memory that this graph made for the call
(without a fill, if it comes from `empty`), or an argument that receives the result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node as FxNode

from lenz.errors import Unsupported
from lenz.ir.graph import Atom, Extern, Named, outs_of
from lenz.ir.tensor import TensorType
from lenz.lower.builder import GraphBuilder, Value, take_back
from lenz.lower.fallback import ToAtom
from lenz.lower.pointwise import is_own
from lenz.sym import ONE, ZERO, Sym
from lenz.traits import has

COPY = torch.ops.aten.copy_.default
Env = Mapping[FxNode, Any]
TypeOf = Callable[[torch.Tensor], TensorType]


def is_user_kernel(n: FxNode) -> bool:
    """True for a call of a kernel that the frontend has bound."""
    return "user_kernel" in n.meta


def is_custom_op(n: FxNode) -> bool:
    """True for a call of a custom op that writes arguments, in torch's functional form."""
    is_written = n.target is torch.ops.higher_order.auto_functionalized_v2
    return is_written and isinstance(n.args[0], torch._ops.OpOverload)


def call_custom_op(b: GraphBuilder, n: FxNode, env: Env, atom: ToAtom, type_of: TypeOf) -> Any:
    """Add the call to the graph; returns the results of the op, then the tensors that it writes.

    torch's form of an op with `torch.Tag.out` allocates these, and gives the results of the op
    alone: a single one is no tuple.
    """
    val = n.meta["val"]
    parts = (val,) if (single := isinstance(val, torch.Tensor)) else val
    types = {k: type_of(parts[k]) for k in given_to(n)}
    places = {k: _memory(b, n, k, env, t) for k, t in types.items()}
    asked = {**n.kwargs, "_all_bases": [*places.values()], "_only_clone_these_bases": ()}
    made = b.extern(
        "higher_order.auto_functionalized_v2",
        (atom(n.args[0]),),
        tuple([(name, atom(a)) for name, a in asked.items()]),
        outs=tuple([type_of(p) if isinstance(p, torch.Tensor) else None for p in parts]),
        single=single,
        mutates=tuple([p.name for p in places.values()]),
        aliases=tuple([(k, p.name) for k, p in places.items()]),
        reason="not an aten op",
        holds=True,
        draws="numbers",
    )
    return made[0] if single else made


def call_user_kernel(
    b: GraphBuilder, n: FxNode, env: Env, atom: ToAtom, type_of: TypeOf
) -> dict[str, Value]:
    """Add the call to the graph; returns the tensors that it writes, by parameter name.

    Raises Unsupported for block descriptors in their old form, which Triton has dropped, and for a
    written tensor whose elements share memory.
    """
    asked: Any = n.kwargs
    descriptors: list[Atom] = []
    for name, (kind, parts) in asked["tma_descriptor_metadata"].items():
        if kind != "stable":
            raise Unsupported(f"an {kind} descriptor as parameter {name} of a user's kernel")
        descriptors.append((name, atom(parts[0])))
    values = {name: atom(a) for name, a in asked["kwargs"].items()}
    types = {name: type_of(t) for name, t in n.meta["val"].items()}
    places = {name: _memory(b, n, name, env, t) for name, t in types.items()}
    values.update({name: atom(place) for name, place in places.items()})
    made = b.extern(
        "lenz.user_kernel",
        (
            atom(n.meta["user_kernel"]),
            atom(asked["grid"]),
            tuple(values),
            tuple(values.values()),
            tuple([list(values).index(name) for name in places]),
            tuple(descriptors),
        ),
        outs=tuple(types.values()),
        single=False,
        mutates=tuple([p.name for p in places.values()]),
        aliases=tuple([(k, p.name) for k, p in enumerate(places.values())]),
    )
    return {name: out for name, out in zip(places, made, strict=True) if isinstance(out, Value)}


def _memory(b: GraphBuilder, n: FxNode, name: str | int, env: Env, type: TensorType) -> Value:
    """The memory that the call writes: the tensor itself, or a copy."""
    node = given_to(n)[name]
    x: Value = env[node]
    buffers = [id(v.buffer) for v in env.values() if isinstance(v, Value)]
    if x.buffer.type == type and list(given_to(n).values()).count(node) == 1:
        if node.op == "placeholder":
            if _is_written_back(b, n, name, node, env):
                return x
        # Other nodes may have become the same buffer: aliases.
        elif len(node.users) == 1 and is_own(b, x) and buffers.count(id(x.buffer)) == 1:
            if has(node.target, "unset"):
                _leave_unfilled(b, x)
            return x
    if any(s is ZERO and e is not ONE for s, e in zip(type.layout.stride, type.shape, strict=True)):
        raise Unsupported(f"tensor {node.name} of a user's kernel, whose elements share memory")
    return b.map(x.at, type, f"{x.name}_copy")


def given_to(n: FxNode) -> Mapping[Any, Any]:
    """The arguments of a user's kernel, FX nodes and numbers, by parameter name.

    Of a custom op, the tensors that it writes, by their place among the results.
    """
    asked: Any = n.kwargs
    if is_user_kernel(n):
        return dict(asked["kwargs"])
    bases = asked["_all_bases"]
    return dict(enumerate(bases, len(n.meta["val"]) - len(bases)))


def _leave_unfilled(b: GraphBuilder, x: Value) -> None:
    """Drop the fill that the lowering of `empty` has added."""
    layout, op = x.buffer.type.layout, "aten.empty_strided.default"
    kwargs = (("dtype", Named("dtype", x.dtype.name)), ("device", Named("device", x.device)))
    made = Extern((x.buffer,), op, (layout.shape, layout.stride), kwargs, reason="library")
    nodes = [made if x.buffer in outs_of(m) else m for m in b.nodes]
    take_back(b, 0)
    b.nodes += nodes


def _is_written_back(b: GraphBuilder, n: FxNode, name: str | int, arg: FxNode, env: Env) -> bool:
    """True if the call's result goes into the argument and the old values are not needed.

    Calls may be chained: the result of the last one counts.
    """
    others = [u for u in arg.users if u is not n]
    copies = [u for u in others if u.target is COPY and u.args[0] is arg]
    earlier = [env.get(u) for u in others if u not in copies]  # None for later nodes
    done = all(isinstance(v, Sym) or (isinstance(v, Value) and is_own(b, v)) for v in earlier)
    if len(copies) != 1 or not done:
        return False
    while True:
        picked = [u for u in n.users if u.target is operator.getitem and u.args[1] == name]
        if len(picked) != 1 or any(u.op == "output" for u in picked[0].users):
            return False
        if picked[0] is copies[0].args[1]:
            return True
        readers = list(picked[0].users)
        if len(readers) != 1 or not (is_user_kernel(readers[0]) or is_custom_op(readers[0])):
            return False
        n = readers[0]
        names = [k for k, a in given_to(n).items() if a is picked[0]]
        if len(names) != 1 or (is_user_kernel(n) and names[0] not in n.meta["val"]):
            return False
        name = names[0]
