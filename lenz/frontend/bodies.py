"""The bodies of branches, loops and nested regions, compiled as separate graphs.

    cond(p, true_graph, false_graph, (x,))   ==>   the same call of two compiled functions

Other higher-order operators do more than call a body: they differentiate or vectorise it.  Their
bodies stay as torch made them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node

from lenz.frontend.build import build
from lenz.frontend.program import CompileFX, FxProgram

CALLERS = ("cond", "invoke_subgraph", "while_loop", "while_loop_stack_output", "scan", "map_impl")


def with_bodies(p: FxProgram, compile_fx: CompileFX, native: frozenset[str]) -> FxProgram:
    """Return the program with the bodies of its loops and branches compiled.

    A body that writes into its arguments stays as it is: a loop may hand it copies.
    """
    made: dict[str, Any] = {}
    for name, body in p.modules.items():
        if isinstance(body, GraphModule) and _is_called(p.gm, name):
            own = GraphModule(body, copy.deepcopy(body.graph))
            inner = build(own, [], "body", f"{p.name}.{name}", frozenset(), "", native)
            if not inner.mutated:
                run = compile_fx(with_bodies(inner, compile_fx, native))
                made[name] = _unboxed(run, isinstance(own.graph.output_node().args[0], Node))
    return replace(p, modules={**p.modules, **made})


def _is_called(gm: GraphModule, name: str) -> bool:
    """Say whether only `CALLERS` use the attribute."""
    users = [u for n in gm.graph.nodes if n.op == "get_attr" and n.target == name for u in n.users]
    return all(getattr(u.target, "__name__", "") in CALLERS for u in users)


def _unboxed(run: Callable[[list[Any]], Sequence[Any]], is_single: bool) -> Callable[..., Any]:
    """Return `run` as a function of separate arguments; with `is_single` it returns one result."""

    def call(*args: Any) -> Any:
        found = tuple(run(list(args)))
        return found[0] if is_single else found

    return call
