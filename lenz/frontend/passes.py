"""The user's passes: functions that change the graph of aten ops before lenz lowers it.

A pass sees each graph from AOTAutograd. Its result is part of the program, and so of the cache key:
another pass, or another version of it, gives another key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from lenz.errors import UserError
from lenz.frontend.program import GraphKind
from lenz.frontend.rebase import returned_of
from lenz.options import Pass, named_function

# Ops with data-dependent result sizes, which get a new name with each trace.
UNTRACED = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def run_passes(gm: GraphModule, kind: GraphKind, passes: Sequence[Pass]) -> GraphModule:
    """Run the passes in order; raises UserError with the name of one that fails."""
    for name, given in passes:
        run, gm.meta["kind"] = named_function("passes", name), kind
        before = [len(x) for x in arguments_and_results(gm)]
        was = {n: (n.target, n.args, n.kwargs) for n in gm.graph.nodes}
        try:
            with _disable_current_modes():  # a constant of the pass is a real tensor
                made = run(gm, **dict(given))
            gm = gm if made is None else made
            gm.graph.lint()
            after = [len(x) for x in arguments_and_results(gm)]
            if after != before:
                raise ValueError(f"arguments and results were {before}, and are {after}")
            trace_new(gm, was)
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
            raise UserError(f"the pass {name} failed on the {kind} graph: {why}") from e
    return gm


def arguments_and_results(gm: GraphModule) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the arguments and results of a graph."""
    return gm.graph.find_nodes(op="placeholder"), returned_of(gm.graph)


def trace_new(gm: GraphModule, was: Mapping[Node, tuple[Any, ...]]) -> None:
    """Compute the fake value of each new or changed node, and of every node that depends on one."""
    mode: Any = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
    new: set[Node] = set()
    for n in gm.graph.nodes:
        if was.get(n) not in (None, (n.target, n.args, n.kwargs)):
            n.meta.pop("val", None)
        is_made = "val" not in n.meta
        if n.op == "get_attr" and is_made and isinstance(value := fake_value(n), torch.Tensor):
            n.meta["val"] = mode.from_tensor(value, static_shapes=True)
        elif n.op == "call_function" and (is_made or not new.isdisjoint(n.all_input_nodes)):
            if not is_made and any(tag in getattr(n.target, "tags", ()) for tag in UNTRACED):
                continue
            args, kwargs = _pytree.tree_map_only(Node, fake_value, (n.args, n.kwargs))
            with mode:
                n.meta["val"] = n.target(*args, **kwargs)
            new.add(n)


def fake_value(n: Node) -> Any:
    """Return the fake value of a node, or the body that it refers to."""
    owner = n.graph.owning_module
    return n.meta["val"] if "val" in n.meta else reduce(getattr, str(n.target).split("."), owner)
