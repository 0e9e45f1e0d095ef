"""Values that depend on no input of a graph: computed while it is compiled.

    ones = torch.ones(8, 8, device="cuda"); m = ones.tril(); n = m[None]   ==>   the tensor n

Works on the graph of Dynamo, where `scaled_dot_product_attention` is one call and a mask is made by
the user's own calls, and on that of AOTAutograd.  The calls run on real tensors of the CPU.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx import GraphModule, Node
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lenz.frontend.values import storage_of

__all__ = [
    "FAULTS",
    "KnownValues",
    "checkpointed",
    "is_plain",
    "operands",
    "run",
    "storages",
    "writes",
]

# Elements of the largest tensor that is computed: 16 Mi take about 10 ms on one core.
LIMIT = 1 << 24
# Calls that look at the shape and type of their first argument alone.
SHAPE_ONLY = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "size")
CALLS = ("call_function", "call_method")
UNKNOWN = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "cuda")
ASSIGNED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
WRITES = (operator.setitem, *(getattr(operator, f"i{x}") for x in ASSIGNED))


class Refused(Exception):
    """The value depends on an input, on chance, or on more work than a compiler should do."""


class KnownValues:
    """The values of one graph of Dynamo that depend on no input.

    All sizes must be numbers.  Writes into a tensor, or into what it is made from, are followed.
    Answers are kept: the layers of a model ask for the same mask.  `given` tells the values of
    placeholders: those of a body that is called with a known value.
    """

    __slots__ = ("_answers", "_given", "_place", "_writers")

    def __init__(
        self, gm: GraphModule, given: Callable[[Node], torch.Tensor | None] = lambda n: None
    ) -> None:
        self._given = given
        self._place = {n: i for i, n in enumerate(gm.graph.nodes)}
        self._writers = [n for n in self._place if writes(n)]
        self._answers: dict[tuple[Node, ...], torch.Tensor | None] = {}

    def value(self, node: Node, at: Node) -> torch.Tensor | None:
        """Return the tensor that `node` holds when `at` is reached; None if that is not known."""
        try:
            nodes = self._closure(node, at)
            if nodes not in self._answers:
                self._answers[nodes] = None
                mode: Any = Checked  # its class has no annotations
                with _disable_current_modes(), torch.no_grad(), mode():
                    self._answers[nodes] = self._run(nodes)[node]
        except FAULTS:  # about the device, or eager will raise it as well
            return None
        return self._answers[nodes]

    def _run(self, nodes: tuple[Node, ...]) -> dict[Node, Any]:
        values: dict[Node, Any] = {}
        for n in nodes:
            if n.op == "placeholder" and (value := self._given(n)) is not None:
                values[n] = value.clone()  # a body may write into it
        return run((n for n in nodes if n not in values), values)

    def _closure(self, node: Node, at: Node) -> tuple[Node, ...]:
        """Return the nodes that decide `node` before `at`, in order; raises Refused."""
        needed: dict[Node, None] = {}
        touched: dict[int, None] = {}
        earlier = [w for w in self._writers if self._place[w] < self._place[at]]
        todo = [node]
        while todo:
            n = todo.pop()
            if n not in needed:
                is_given = n.op == "placeholder" and self._given(n) is not None
                if not is_given and (n.op not in CALLS or not is_plain(n)):
                    raise Refused
                needed[n] = None
                touched.update(dict.fromkeys(storages(n)))
                todo += operands(n)
            if not todo:  # everything that may write into one of these tensors counts as well
                todo = [
                    w
                    for w in earlier
                    if w not in needed
                    and any(s in touched for a in w.all_input_nodes for s in storages(a))
                ]
        return tuple(sorted(needed, key=self._place.__getitem__))


def seen(n: Node) -> Any:
    """Return what tracing made of a node: fake tensors, sizes."""
    return n.meta["val"] if "val" in n.meta else n.meta.get("example_value")


def name_of(n: Node) -> str:
    name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
    return name.partition(".")[0]


def operands(n: Node) -> list[Node]:
    """Return the arguments whose values `n` reads."""
    found = list(n.all_input_nodes)
    return found[1:] if name_of(n) in SHAPE_ONLY else found


def storages(n: Node) -> Iterator[int]:
    for leaf in _pytree.tree_leaves(seen(n)):
        key = storage_of(leaf)
        if key is not None:
            yield key


def is_plain(n: Node, limit: int = LIMIT) -> bool:
    """Say whether `n` is a call of torch or an operator that gives at most `limit` elements."""
    for leaf in _pytree.tree_leaves(seen(n)):
        if isinstance(leaf, torch.Tensor):
            if not all(isinstance(s, int) for s in leaf.shape) or leaf.numel() > limit:
                return False
        elif not isinstance(leaf, (bool, int, float, type(None))):
            return False
    return name_of(n) not in UNKNOWN and (n.op == "call_method" or is_torch(n.target))


def is_torch(target: Any) -> bool:
    """Say whether a function is torch's own or an operator: its effects show in its name."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "prims")
    name = getattr(target, "__name__", "")
    return any(
        getattr(m, name, None) is target
        for m in (operator, torch, torch.nn.functional, torch._C._nn)
    )


def writes(n: Node) -> bool:
    """Say whether `n` may write into one of its arguments."""
    if n.op not in CALLS:
        return n.op == "call_module"
    if (body := checkpointed(n)) is not None:
        return any(writes(m) for m in body.graph.nodes)
    if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
        return bool(n.target._schema.is_mutable)
    if n.op == "call_method" or (n.op == "call_function" and is_torch(n.target)):
        if getattr(operator, name_of(n), None) is n.target:  # operator.and_ writes nothing
            return n.target in WRITES
        return name_of(n).endswith("_") or "out" in n.kwargs or in_place(n)
    return True


def checkpointed(n: Node) -> GraphModule | None:
    """Return the body of a call of activation checkpointing, None for other nodes."""
    gm = n.graph.owning_module
    if n.target is not tag_activation_checkpoint or gm is None or not isinstance(n.args[0], Node):
        return None
    found = gm.get_submodule(str(n.args[0].target))
    return found if isinstance(found, GraphModule) else None


def in_place(n: Node) -> bool:
    """Say whether a function of torch.nn.functional is asked to work in place."""
    if not isinstance(n.target, FunctionType):
        return False
    given = inspect.signature(n.target).bind(*n.args, **n.kwargs).arguments
    return bool(given.get("inplace") or given.get("kwargs", {}).get("inplace"))


FAULTS = (Refused, RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


class Checked(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is untyped here
    """Raises Refused for ops that are random or not aten's own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, if equal arguments always give equal results."""
        if torch.Tag.nondeterministic_seeded in func.tags or not is_torch(func):
            raise Refused
        return func(*args, **(kwargs or {}))


def run(calls: Iterable[Node], values: dict[Node, Any]) -> dict[Node, Any]:
    """Run the calls on the CPU, and add their results to `values`.

    Raises Refused where a result has not the shape and type that tracing saw.
    """

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
            fake = seen(n)
            if values[n].shape != fake.shape or values[n].dtype != fake.dtype:
                raise Refused
    return values


def stand_in(n: Node) -> torch.Tensor:
    """Return a tensor of the shape and type of an input whose elements nobody reads."""
    fake = seen(n)
    return torch.zeros((), dtype=fake.dtype).expand(fake.shape)
