"""Which aten ops AOTAutograd decomposes before lenz sees the graph.

A decomposition adds nodes, and every stage of AOTAutograd traces each of them with fake tensors;
`lower/` takes a composite op in microseconds.  So an op with a lowering stays whole, and so does an
op whose library call beats any fusion.  All other ops are decomposed into pointwise ops and
reductions, which fuse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import _core_aten_decompositions_post_autograd, decomposition_table

from lenz.frontend.cells import CELLS
from lenz.frontend.refusals import kept_whole
from lenz.frontend.strides import laid_as_in_eager, rule_of
from lenz.traits import has


@lru_cache(maxsize=4)
def decompositions(native: frozenset[str]) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Return the decomposition table for AOTAutograd.

    `native` holds the ops that `lower/` takes natively, as "aten.gelu.default" (one overload) or
    "aten.gelu" (all overloads). Every other op with a decomposition in torch's core table, or with
    the trait `parts`, is decomposed unless it is a library call; so are `CELLS`. The table is
    shared: do not write into it.
    """
    table: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
    core = _core_aten_decompositions_post_autograd()
    for op, rule in decomposition_table.items():
        if not isinstance(op, torch._ops.OpOverload):
            continue
        name = str(op)  # "aten.gelu.default"
        packet = name.rsplit(".", 1)[0]
        if op not in core and not has(name, "parts"):
            continue
        if name in native or packet in native or has(name, "library"):
            continue
        rule = rule if rule_of(op) is None else laid_as_in_eager(op, rule)
        table[op] = kept_whole(packet, rule)
    return {**table, **CELLS}
