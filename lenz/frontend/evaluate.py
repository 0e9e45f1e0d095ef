"""Values that depend on no input of a graph: computed while it is compiled.

    ones = torch.ones(8, 8, device="cuda"); m = ones.tril(); n = m[None]   ==>   the tensor n

Works on Dynamo's graph, before AOTAutograd, where `scaled_dot_product_attention` is one call and a
mask is still made by the user's own calls.  They run on real tensors of the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lenz.frontend.values import storage_of

__all__ = ["known_value"]

# Elements of the largest tensor that is computed: 16 Mi take about 10 ms on one core.
LIMIT = 1 << 24
# Calls that look at the shape and type of their first argument alone.
SHAPE_ONLY = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "size")
UNKNOWN = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "cuda")
WRITES = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.iand,
          operator.ior, operator.ixor, operator.itruediv)  # fmt: skip


class Refused(Exception):
    """The value depends on an input, on chance, or on more work than a compiler should do."""


def known_value(
    gm: GraphModule, node: Node, at: Node, memo: dict[tuple[Node, ...], torch.Tensor | None]
) -> torch.Tensor | None:
    """Return the tensor that `node` holds when `at` is reached; None if that is not known.

    All sizes must be numbers.  Writes into the tensor, or into what it is made from, are followed.
    `memo` holds the answers for one graph: the layers of a model ask for the same mask.
    """
    try:
        calls = closure(gm, node, at)
        if calls not in memo:
            memo[calls] = None
            mode: Any = Checked  # its class has no annotations
            with _disable_current_modes(), torch.no_grad(), mode():
                memo[calls] = run(calls)[node]
    except FAULTS:  # about the device, or eager will raise it as well
        return None
    return memo[calls]


def closure(gm: GraphModule, node: Node, at: Node) -> tuple[Node, ...]:
    """Return the calls that decide `node` before `at`, in order; raises Refused."""
    earlier: list[Node] = []
    for n in gm.graph.nodes:
        if n is at:
            break
        earlier.append(n)
    needed: dict[Node, None] = {}
    touched: dict[int, None] = {}
    todo = [node]
    while todo:
        n = todo.pop()
        if n not in needed:
            if n.op not in ("call_function", "call_method") or not is_plain(n):
                raise Refused
            needed[n] = None
            touched.update(dict.fromkeys(storages(n)))
            todo += operands(n)
        if not todo:  # everything that may write into one of these tensors counts as well
            todo = [w for w in earlier if w not in needed and may_write(w, touched)]
    return tuple(n for n in earlier if n in needed)


def name_of(n: Node) -> str:
    return n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")


def operands(n: Node) -> list[Node]:
    """Return the arguments whose values `n` reads."""
    found = list(n.all_input_nodes)
    return found[1:] if name_of(n) in SHAPE_ONLY else found


def storages(n: Node) -> Iterator[int]:
    for leaf in _pytree.tree_leaves(n.meta.get("example_value")):
        key = storage_of(leaf)
        if key is not None:
            yield key


def is_plain(n: Node) -> bool:
    """Say whether `n` is a call of torch or of an operator on tensors with known sizes."""
    for leaf in _pytree.tree_leaves(n.meta.get("example_value")):
        if isinstance(leaf, torch.Tensor):
            if not all(isinstance(s, int) for s in leaf.shape) or leaf.numel() > LIMIT:
                return False
        elif not isinstance(leaf, (bool, int, float, type(None))):
            return False
    return name_of(n) not in UNKNOWN and (n.op == "call_method" or is_torch(n.target))


def is_torch(target: Any) -> bool:
    """Say whether a function is torch's own or an operator: its effects show in its name."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten"
    name = getattr(target, "__name__", "")
    return any(
        getattr(m, name, None) is target
        for m in (operator, torch, torch.nn.functional, torch._C._nn)
    )


def may_write(n: Node, touched: Mapping[int, None]) -> bool:
    """Say whether `n` may write into one of the storages."""
    if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
        writes = n.target._schema.is_mutable
    elif n.op == "call_method" or (n.op == "call_function" and is_torch(n.target)):
        # A positional True may be the `inplace` of a function.
        flags = "out" in n.kwargs or any(a is True for a in (*n.args, n.kwargs.get("inplace")))
        writes = flags or n.target in WRITES or name_of(n).endswith("_")
    else:
        writes = True
    return writes and any(s in touched for a in n.all_input_nodes for s in storages(a))


FAULTS = (Refused, RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


class Checked(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is untyped here
    """Raises Refused for ops that are random or not aten's own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, if equal arguments always give equal results."""
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in (
            "aten",
            "prims",
        ):
            raise Refused
        return func(*args, **(kwargs or {}))


def run(calls: tuple[Node, ...]) -> dict[Node, Any]:
    """Run the calls on the CPU; raises Refused where the result is not what Dynamo saw."""
    values: dict[Node, Any] = {}

    def value(a: Any) -> Any:
        if isinstance(a, Node):
            return values[a] if a in values else stand_in(a)
        is_device = isinstance(a, torch.device) or (isinstance(a, str) and a.startswith("cuda"))
        return torch.device("cpu") if is_device else a

    for n in calls:
        args, kwargs = torch.fx.node.map_aggregate((n.args, n.kwargs), value)
        call: Callable[..., Any] = (
            getattr(args[0], n.target) if isinstance(n.target, str) else n.target
        )
        values[n] = call(*(args[1:] if n.op == "call_method" else args), **kwargs)
        if isinstance(values[n], torch.Tensor):
            seen = n.meta["example_value"]
            if values[n].shape != seen.shape or values[n].dtype != seen.dtype:
                raise Refused
    return values


def stand_in(n: Node) -> torch.Tensor:
    """Return a tensor of the shape and type of an input whose elements nobody reads."""
    seen = n.meta["example_value"]
    return torch.zeros((), dtype=seen.dtype).expand(seen.shape)
