"""Values that depend on no input of a graph, computed at compile time.

    ones = torch.ones(8, 8, device="cuda"); m = ones.tril(); n = m[None]   ==>   the tensor n

Works on Dynamo's graph, where `scaled_dot_product_attention` is one call and the user's own calls
make the mask, and on AOTAutograd's. The calls run on real CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lenz.frontend.calls import CALLS, callee, is_torch, operands, storages, traced, writes
from lenz.frontend.patterns import follow_pattern, number
from lenz.traits import has

# Elements of the largest tensor computed, a mask of 8192 positions: 50 ms per op.
LIMIT = 1 << 26
PRIM_DIV = (torch.ops.prims.div, torch.ops.prims.div.default)
Given = Callable[[Node], torch.Tensor | None]


class Unknown(Exception):
    """The value depends on an input, is random, or takes more work than a compiler should do."""


class KnownValues:
    """The values of one Dynamo graph that depend on no input.

    Writes into a tensor, or into its sources, are followed. Answers are cached: the layers of a
    model ask for the same mask. `given` holds the values of placeholders, for a body called with
    known values. With symbolic sizes a value is computed for one small size in place of each
    symbol, if that shows the pattern for all sizes (see `patterns`).
    """

    def __init__(self, gm: GraphModule, given: Given = lambda n: None) -> None:
        self._given = given
        self._place = {n: i for i, n in enumerate(gm.graph.nodes)}
        self._writers = [n for n in self._place if writes(n)]
        self._answers: dict[tuple[Node, ...], torch.Tensor | None] = {}

    def value(self, node: Node, at: Node) -> torch.Tensor | None:
        """Return the tensor that `node` holds when `at` runs; None if unknown."""
        try:
            nodes = self._closure(node, at)
            if nodes not in self._answers:
                self._answers[nodes] = None
                mode: Any = Checked  # its class has no annotations
                with _disable_current_modes(), torch.no_grad(), mode():
                    self._answers[nodes] = self._run(nodes)[node]
        except FAULTS:  # about the device, or an error in eager as well
            return None
        return self._answers[nodes]

    def _run(self, nodes: tuple[Node, ...]) -> dict[Node, Any]:
        told = {n: self._given(n) for n in nodes if n.op == "placeholder"}
        values = {n: v.clone() for n, v in told.items() if v is not None}  # a body may write
        return run_calls((n for n in nodes if n not in values), values)

    def _closure(self, node: Node, at: Node) -> tuple[Node, ...]:
        """Return the nodes before `at` that determine `node`, in order; raises Unknown."""
        needed, touched, todo = dict[Node, None](), set[int](), [node]
        earlier = [w for w in self._writers if self._place[w] < self._place[at]]
        while todo:
            n = todo.pop()
            if n not in needed:
                is_given = n.op == "placeholder" and self._given(n) is not None
                if not is_given and n.op not in CALLS:
                    raise Unknown
                needed[n] = None
                touched.update(storages(n))
                todo += operands(n)
            if not todo:  # also everything that may write into one of these tensors
                left = (w for w in earlier if w not in needed)
                todo = [w for w in left if any(s in touched for s in storages(*w.all_input_nodes))]
        nodes = tuple(sorted(needed, key=self._place.__getitem__))
        if not all(map(is_plain, nodes)) and not follow_pattern(nodes):
            raise Unknown
        return nodes


def is_plain(n: Node, limit: int = LIMIT) -> bool:
    """Say whether `n` has at most `limit` elements and calls torch or an operator, if anything.

    False if it takes a symbolic size: full([4], s0) has a plain shape, but its elements depend on
    s0.
    """
    if any(isinstance(traced(a), torch.SymInt) for a in n.all_input_nodes):
        return False
    for leaf in _pytree.tree_leaves(traced(n)):
        if isinstance(leaf, torch.Tensor):
            if not all(isinstance(s, int) for s in leaf.shape) or leaf.numel() > limit:
                return False
        elif not isinstance(leaf, (bool, int, float, type(None))):
            return False
    is_own = n.op != "call_function" or is_torch(n.target)
    return is_own and not (callee(n) == "cuda" or has(callee(n), "unset")) and not may_differ(n)


def may_differ(n: Node) -> bool:
    """Say whether a GPU may return integers that a CPU does not.

    It makes others of NaN and of floats beyond the type. For the lowest integer divided by -1,
    rounded to zero, it returns some number, so a valid program may do it, and x86 may trap.
    """
    to, *given = [getattr(traced(a), "dtype", torch.bool) for a in (n, *operands(n))]
    if to.is_floating_point or to is torch.bool:
        return False
    is_trunc = n.target in PRIM_DIV or n.kwargs.get("rounding_mode") == "trunc"
    return is_trunc or (traced(n).device.type != "cpu" and any(d.is_floating_point for d in given))


FAULTS = (Unknown, RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


class Checked(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is untyped here
    """Raises Unknown for ops that are random or not aten's own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` if equal arguments always give equal results."""
        if torch.Tag.nondeterministic_seeded in func.tags or not is_torch(func):
            raise Unknown
        return func(*args, **(kwargs or {}))


def run_calls(calls: Iterable[Node], values: dict[Node, Any]) -> dict[Node, Any]:
    """Run the calls on the CPU, and add their results to `values`.

    Raises Unknown if a result differs from the traced shape or type.
    """

    def value(a: Any) -> Any:
        if isinstance(a, Node):
            is_size = isinstance(traced(a), torch.SymInt)
            return values[a] if a in values else number(traced(a)) if is_size else stand_in(a)
        is_device = isinstance(a, torch.device) or (isinstance(a, str) and a.startswith("cuda"))
        return torch.device("cpu") if is_device else a

    for n in calls:
        args, kwargs = torch.fx.node.map_aggregate((n.args, n.kwargs), value)
        call: Any = getattr(args[0], n.target) if isinstance(n.target, str) else n.target
        values[n] = call(*(args[1:] if n.op == "call_method" else args), **kwargs)
        if isinstance(values[n], torch.Tensor):
            if values[n]._is_zerotensor():  # it has no memory
                values[n] = values[n].clone()
            fake, found = traced(n), values[n]
            if found.dtype != fake.dtype or [*found.shape] != [number(s) for s in fake.shape]:
                raise Unknown
    return values


def stand_in(n: Node) -> torch.Tensor:
    """Return a tensor of the shape and type of an input; nobody reads its elements."""
    fake = traced(n)
    return torch.zeros((), dtype=fake.dtype).expand([number(s) for s in fake.shape])
