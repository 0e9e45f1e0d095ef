"""Activations that a training step saves as 8-bit floats: half the memory, less exact gradients.

%s = _to_copy(clamp(%x, -57344, 57344), float8_e5m2)     forward saves %s, not %x
%y = _to_copy(%s, bfloat16)                              backward reads %y
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from lenz.frontend.again import converted, readers_of
from lenz.frontend.budget import bytes_of
from lenz.frontend.calls import inserter
from lenz.frontend.overwritten import unviewed
from lenz.frontend.rebase import returned_of
from lenz.frontend.values import dense_order, unguarded

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
LEAST = 1 << 16  # bytes of an activation: less is not worth a rounding


def save_in_float8(forward: Graph, backward: Graph, first: int, dtype: torch.dtype) -> None:
    """Save activations of half types as `dtype`, in place. Results from `first` on are saved."""
    results = [*returned_of(forward)]
    alive = {unviewed(n) for n in results[:first] if isinstance(n, Node)}
    reads = {n.name: n for n in backward.find_nodes(op="placeholder")}
    for k, n in enumerate(results[first:], first):
        if isinstance(n, Node) and unviewed(n) not in alive and may_be_rounded(n, reads[n.name]):
            results[k] = short = in_eight_bits(forward, n, dtype)
            restored(backward, reads[n.name], short)
    forward.output_node().args = (tuple(results),)


def may_be_rounded(n: Node, read: Node) -> bool:
    """Say whether a saved value may be shorter, for its place and for what reads it in backward.

    Arguments live on anyway. The gradient of attention divides probabilities by a sum from forward:
    of rounded queries and keys they would not add up to 1.
    """
    x = n.meta["val"]
    if not isinstance(x, torch.Tensor) or x.dtype not in HALVES or unviewed(n).op == "placeholder":
        return False
    is_exact = any("attention" in str(u.target) for u in readers_of(read))
    is_large = bytes_of(n) >= LEAST and dense_order(x.shape, x.stride()) is not None
    return is_large and not is_exact and bool(read.users)


def in_eight_bits(forward: Graph, n: Node, dtype: torch.dtype) -> Node:
    """Insert the conversion behind a value, so that its memory can be freed early."""
    call, largest = inserter(forward, n), torch.finfo(dtype).max
    with forward.inserting_before(n.next), unguarded(n.meta["val"].fake_mode):
        short: Node = converted(call, call(aten.clamp.default, n, -largest, largest), dtype)
    return short


def restored(backward: Graph, read: Node, short: Node) -> None:
    """Convert a saved value back, before its first reader."""
    value, readers = read.meta["val"], [*read.users]
    read.meta = {**read.meta, "val": short.meta["val"]}
    with backward.inserting_before(min(readers)), unguarded(value.fake_mode):
        y = converted(inserter(backward, min(readers)), read, value.dtype)
    for reader in readers:
        reader.replace_input_with(read, y)
