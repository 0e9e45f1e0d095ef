"""Calls that lenz adds to Dynamo's graph before AOTAutograd traces it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = ["called", "value_of"]

KEPT = ("stack_trace", "nn_module_stack", "custom")  # of `meta`: where a call comes from


def value_of(a: Any) -> torch.Tensor | None:
    """Return the fake tensor behind an argument, None if it is no tensor."""
    value = a.meta.get("example_value") if isinstance(a, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def called(
    gm: GraphModule, before: Node, target: Any, *args: Any, like: Node | None = None, **kwargs: Any
) -> Node:
    """Insert a call of a function, or of a method by its name, which counts as a part of `like`.

    `like` is `before` if it is not given.
    """
    with gm.graph.inserting_before(before):
        kind = "call_method" if isinstance(target, str) else "call_function"
        made = gm.graph.create_node(kind, target, args, kwargs)
    made.meta = {k: v for k, v in (like or before).meta.items() if k in KEPT}
    return made
