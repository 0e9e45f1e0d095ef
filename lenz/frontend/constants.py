"""Values of an AOTAutograd graph that depend on no input: filled, stored, or left alone.

    g = ge(arange(8), 0); y = where(g, x, 0.0)           ==>   y = where(full([8], True), x, 0.0)
    p = convert(arange(8)); z = bmm(w, expand(p, ...))   ==>   z = bmm(w, a constant of 8 numbers)

A uniform value becomes a fill, which loops fold.  A small value that a library call reads becomes a
constant, which saves one launch per call.  All other values stay loops: an index and a comparison
are cheaper than a mask in memory, and a large constant would hold memory to save a microsecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from lenz.frontend.calls import operands, storages
from lenz.frontend.evaluate import FAULTS, is_plain, run_calls
from lenz.frontend.normalise import is_pure, prune, touched_by
from lenz.traits import has

full, as_strided = torch.ops.aten.full.default, torch.ops.aten.as_strided.default
SMALL = 1 << 14  # bytes of a constant: 4096 positions
LIMIT = 1 << 20  # most elements computed to see whether all are equal: about 1 ms


def fold_known(gm: GraphModule, native: frozenset[str]) -> None:
    """Rewrite the values of a normalised graph that depend on no input, in place.

    `native` names the ops that become loops (see `decompositions`); other calls are library calls.
    Sizes must be numbers. A value that leaves the graph or is written stays: it is new memory on
    every call.
    """
    touched = touched_by(gm.graph)
    pinned = touched.returned | touched.mutated
    known: dict[Node, None] = {}
    for n in gm.graph.nodes:
        is_known = n.op == "call_function" and all(a in known for a in operands(n))
        if is_known and is_pure(n) and is_plain(n, LIMIT) and pinned.isdisjoint(storages(n)):
            known[n] = None
    values: dict[Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for n in known:
            readers = [u for u in n.users if u not in known]
            calls = [u for u in readers if not is_native(u, native)]
            loops = [] if has(n.target, "fill") else [u for u in readers if u not in calls]
            value = evaluated(n, known, values) if calls or loops else None
            if value is None:
                continue
            if calls and (stored := small_constant(gm, n, value)) is not None:
                for u in calls:
                    u.replace_input_with(n, stored)
            if loops and is_uniform(value):
                filled = fill(gm, n, value)
                for u in loops:
                    u.replace_input_with(n, filled)
    prune(gm.graph)


def is_native(n: Node, native: frozenset[str]) -> bool:
    """Say whether a reader becomes loops or a view, or is not a call."""
    name = str(n.target)
    is_call = n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)
    return not is_call or name in native or name.rpartition(".")[0] in native


def evaluated(n: Node, known: Mapping[Node, None], values: dict[Node, Any]) -> torch.Tensor | None:
    """Compute a known node; None if that fails or does not give a tensor."""
    needed = {n}
    for a in reversed([*known]):
        needed.update(operands(a) if a in needed and a not in values else ())
    try:
        run_calls([a for a in known if a in needed and a not in values], values)
    except FAULTS:  # a type without CPU kernels
        return None
    found = values[n]
    return found if isinstance(found, torch.Tensor) and not found.is_complex() else None


def is_uniform(value: torch.Tensor) -> bool:
    """Say whether there are elements and all have the same bits."""
    whole = value.clone(memory_format=torch.contiguous_format)  # without strides of 0
    bits = whole.view(-1).view(torch.uint8).view(-1, value.itemsize)
    return len(bits) > 0 and bool((bits == bits[0]).all())


def fill(gm: GraphModule, n: Node, value: torch.Tensor) -> Node:
    """Insert a fill for a uniform node, with its strides, on which those of others depend."""
    fake, number = n.meta["val"], value.reshape(-1)[0].item()
    steps = zip(fake.shape, fake.stride(), strict=True)
    shape = fake.shape if fake.is_contiguous() else [1 + sum((k - 1) * s for k, s in steps)]
    how = {"dtype": fake.dtype, "device": fake.device, "pin_memory": False}
    with fake.fake_mode, gm.graph.inserting_before(n):
        made = gm.graph.call_function(full, (list(shape), number), how)
        made.meta = {**n.meta, "val": torch.empty(shape, **how)}  # new_empty fails on zero tensors
        if not fake.is_contiguous():
            made = gm.graph.call_function(as_strided, (made, [*fake.shape], [*fake.stride()]))
            made.meta = {**n.meta, "val": torch.empty_strided(fake.shape, fake.stride(), **how)}
    return made


def small_constant(gm: GraphModule, n: Node, value: torch.Tensor) -> Node | None:
    """Insert a constant on the device of `n`; None if it is large or has other strides."""
    fake, memory = n.meta["val"], value.untyped_storage().nbytes()
    if memory > SMALL or value.stride() != fake.stride():
        return None
    try:
        flat = value.as_strided((memory // value.itemsize,), (1,), 0).to(fake.device)
    except FAULTS:  # the device of a fake tensor need not exist
        return None
    name = f"_known{len(gm._buffers)}"
    gm.register_buffer(name, flat.as_strided(value.shape, value.stride(), value.storage_offset()))
    with gm.graph.inserting_before(n):
        made = gm.graph.get_attr(name)
    made.meta = dict(n.meta)
    return made
