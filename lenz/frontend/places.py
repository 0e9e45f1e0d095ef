"""Places of maxima, which the backward half reads from copies in few bits."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from lenz.traits import trait

aten = torch.ops.aten
SHORTENED = 1 << 20  # bytes; less is not worth two conversions


def places_below(n: Node) -> int | None:
    """Return what the numbers of a large i64 tensor of places are below, where that is known."""
    if n.target is not operator.getitem or n.args[1] != 1:
        return None
    source: Any = n.args[0]
    last, choice = (trait(source.target, t) for t in ("places", "choice"))
    if last is None and choice is None:
        return None
    x: Any = source.args[0].meta["val"]
    value: Any = n.meta["val"]
    if last is not None:
        sizes = x.shape[-int(last) :]
    elif choice is not None and x.dim():
        dim = source.args[int(choice) :][:1] or (source.kwargs.get("dim", -1),)
        sizes = (x.shape[dim[0]],)
    else:
        return None
    if not all(isinstance(s, int) for s in (*sizes, value.numel())):
        return None
    return prod(sizes) if value.numel() * value.element_size() >= SHORTENED else None


def shorten(graph: Graph, n: Node, limit: int, backward: set[Node]) -> None:
    """Let the backward half read i64 places in 0 .. limit - 1 from a copy in 16 or 32 bits."""
    readers = [u for u in n.users if u in backward]
    if not readers or limit > 2**31:
        return

    def copy(x: Node, dtype: torch.dtype) -> Node:
        made = graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
        made.meta = {**n.meta, "val": x.meta["val"].to(dtype)}
        return made

    with graph.inserting_after(n), n.meta["val"].fake_mode:
        short = copy(n, torch.int16 if limit <= 2**15 else torch.int32)
    with graph.inserting_after(short), n.meta["val"].fake_mode:
        again = copy(short, torch.int64)
    for u in readers:
        u.replace_input_with(n, again)
