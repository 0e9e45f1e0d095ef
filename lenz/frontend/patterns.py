"""Values of symbolic size that are known by their pattern.

    i = torch.arange(s0); m = i[:, None] >= i       ==>   for any s0, the pattern seen for SIDE

An element depends only on comparisons of its positions i, j, ... with each other and with sums of
the constants, which are at most STEPS.  A larger gap between two positions, or before the first,
may shrink to STEPS + 1 without changing a comparison.  So every combination occurs below SIDE, for
up to four positions.  No size may be less: `arange(s0 // 8) < 5` is all true for s0 = SIDE.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from lenz.frontend.calls import CALLS, SHAPE_ONLY, callee, traced

STEPS = 8
SIDE = 4 * (STEPS + 1) + 1
FILLING = ("full", "full_like", "new_full")
SIZED = ("ones", "zeros", "expand", "expand_as", "arange", *FILLING, *SHAPE_ONLY)
MOVING = ("unsqueeze", "transpose", "clone", "contiguous", "detach", "where", "masked_fill")
CASTS = ("to", "type", "bool", "float", "arange")
# Types that hold positions exactly.
EXACT = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)
SUMS = ("add", "sub", "rsub")
COMPARING = ("lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not")
BITWISE = ("and_", "or_", "xor", "invert")


def number(size: int | torch.SymInt) -> int:
    """Return a size, with 2 SIDE in place of each symbol.

    Raises ValueError if it is less than SIDE: a smaller tensor does not show its pattern.
    """
    if isinstance(size, int):
        return size
    expr = size.node.expr
    if (found := int(expr.subs(dict.fromkeys(expr.free_symbols, 2 * SIDE)))) < SIDE:
        raise ValueError(f"a size of {found} is too small to show a pattern")
    return found


def follow_pattern(nodes: Sequence[Node]) -> bool:
    """Say whether the nodes' values at size SIDE determine them for all sizes."""
    return all(map(is_pattern, nodes)) and sum(map(steps, nodes)) <= STEPS


def is_pattern(n: Node) -> bool:
    """Say whether elements of `n` depend only on their position and constants."""
    name, fake = callee(n), traced(n)
    is_sized = any(isinstance(traced(a), torch.SymInt) for a in n.all_input_nodes)
    if n.op not in CALLS or (is_sized and name not in SIZED):
        return False
    given = [a for a in n.args if isinstance(a, Node)]
    # A fill may be compared with positions; with a size as its value, SIDE would not be
    # representative.
    filling = (traced(a) for a in (*n.args, *n.kwargs.values()) if isinstance(a, Node))
    if name in FILLING and any(isinstance(v, torch.SymInt) for v in filling):
        return False
    if name == "getitem":
        index = n.args[1] if isinstance(n.args[1], tuple) else (n.args[1],)
        return all(i is None or i is ... or i == slice(None) for i in index)
    if name in CASTS:
        if name == "arange":
            return len(n.args) == 1 and fake.dtype in EXACT
        return fake.dtype in EXACT or traced(given[0]).dtype is torch.bool
    if name in SUMS:
        return len(given) == 1 and "alpha" not in n.kwargs  # 2 i - j is not such a comparison
    if name in BITWISE:
        return fake.dtype is torch.bool
    return name in SIZED or name in MOVING or name in COMPARING or name in ("tril", "triu")


def steps(n: Node) -> float:
    """Return how far the constants of `n` may shift a compared position."""
    name = callee(n)
    if name in ("ones", "ones_like", "new_ones"):
        return 1
    if (name in SIZED and name not in FILLING) or name in ("getitem", "unsqueeze", "transpose"):
        return 0
    constants = [abs(a) for a in (*n.args, *n.kwargs.values()) if isinstance(a, (int, float))]
    return sum(c for c in constants if c < 2**63)  # no position is as large as the lowest float
