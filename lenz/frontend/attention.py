"""Keeps attention fused: all-true masks are dropped, causal masks become `is_causal`.

    m = torch.ones(L, L, dtype=torch.bool).tril(); sdpa(q, k, v, attn_mask=m)
        ==>   sdpa(q, k, v, is_causal=True)

torch chooses the kernel while AOTAutograd traces.  The flash kernel takes no mask, and the
efficient kernel takes some. Without either, attention is computed in f32 with matrix products: a
whole BERT on an H200 is then 2.4 times slower than eager. Models often make an all-true mask from
`ones` or `arange`. Eager reads its values; a trace cannot. On CUDA the remaining masks, and the
tensors they mask, get the layout that the efficient kernel requires.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lenz.frontend.calls import called, checkpointed, fake_of, storages, writes
from lenz.frontend.evaluate import Given, KnownValues
from lenz.frontend.layout import gradient_orders, seen_by_calls, with_gradient, with_order
from lenz.frontend.values import dense_order, is_same_size

SDPA = F.scaled_dot_product_attention
OPERANDS = ("query", "key", "value")
NAMES = (*OPERANDS, "attn_mask", "dropout_p", "is_causal")
MaskKind: TypeAlias = Literal["all", "causal", "other"]
WIDTH = 8  # elements of a head that the efficient kernel loads at once: 16 bytes of half types


def has_attention(gm: GraphModule) -> bool:
    """Say whether the graph, or a checkpointed body, calls attention."""
    bodies = [b for n in gm.graph.nodes if (b := checkpointed(n)) is not None]
    return any(n.target is SDPA for n in gm.graph.nodes) or any(map(has_attention, bodies))


def fuse_attention(gm: GraphModule, given: Given = lambda n: None) -> None:
    """Rewrite the attention calls of Dynamo's graph and its checkpointed bodies, in place.

    `given` holds the known values of placeholders.
    """
    bodies = {n: b for n in gm.graph.nodes if (b := checkpointed(n)) is not None}
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is SDPA]
    if not calls and not bodies:
        return
    known, kinds = KnownValues(gm, given), dict[int, MaskKind]()
    for n, body in bodies.items():
        operands = dict(zip(body.graph.find_nodes(op="placeholder"), n.args[1:], strict=True))

        def operand(p: Node, at: Node = n, of: Mapping[Node, Any] = operands) -> Tensor | None:
            return known.value(of[p], at) if isinstance(of[p], Node) else None

        fuse_attention(body, operand)
    for n in calls:
        arguments = {**dict(zip(NAMES, n.args, strict=False)), **n.kwargs}
        if all(fake_of(arguments.get(x)) is not None for x in OPERANDS):
            n.args, n.kwargs = (), arguments
            simplify_mask(n, known, kinds)
            q = fake_of(n.kwargs["query"])
            if q is not None and q.device.type == "cuda":  # torch's kernels
                fit(gm, n)
    gm.recompile()


def simplify_mask(n: Node, known: KnownValues, kinds: dict[int, MaskKind]) -> None:
    """Drop the mask of an attention call if it is known to be all true or causal.

    Kernels disagree about "causal" if the numbers of queries and keys differ. `kinds` caches
    results, by the address of a mask that `known` keeps alive.
    """
    node = n.kwargs.get("attn_mask")
    q, k, fake = (fake_of(n.kwargs.get(x)) for x in ("query", "key", "attn_mask"))
    if not isinstance(node, Node) or q is None or k is None or fake is None:
        return
    if n.kwargs.get("is_causal") or fake.requires_grad or fake.dim() < 2:
        return
    mask = known.value(node, n)
    if mask is None:
        return
    kind = kinds.get(id(mask)) or kinds.setdefault(id(mask), kind_of_mask(mask))
    pairs = zip(reversed(fake.shape), reversed((*q.shape[:-1], k.shape[-2])), strict=False)
    # A mask of more batches gives a result of more batches.
    fits = fake.dim() <= q.dim() and all(is_same_size(m, 1) or is_same_size(m, s) for m, s in pairs)
    is_square = all(is_same_size(x.shape[-2], fake.shape[-1]) for x in (q, k))
    if fits and (kind == "all" or (kind == "causal" and is_square)):
        n.kwargs = {**n.kwargs, "attn_mask": None, "is_causal": kind == "causal"}


def kind_of_mask(mask: Tensor) -> MaskKind:
    """Return the kind of a mask of at least 2 dimensions, whatever the scores are.

    A float mask is added: 0 allows, and only the type's lowest number surely forbids. "causal"
    allows key j to query i for j <= i.
    """
    # One of the repeated elements is enough.
    mask = mask[tuple(slice(0, 1) if s == 0 else slice(None) for s in mask.stride())]
    is_bool = mask.dtype is torch.bool
    allowed = mask if is_bool else mask == 0
    if bool(allowed.all()):
        return "all"
    n = mask.shape[-1]
    if mask.shape[-2] != n:
        return "other"
    forbidden = ~mask if is_bool else mask <= torch.finfo(mask.dtype).min
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    return "causal" if bool(torch.where(causal, allowed, forbidden).all()) else "other"


def fit(gm: GraphModule, n: Node) -> None:
    """Give the operands of a CUDA attention call the form that a fused kernel accepts.

    All kernels take 4 dimensions, the last one dense. None may be empty: a kernel for no heads
    crashes. With 3 dimensions eager computes halves in f32, with gradients that no kernel matches.
    """
    given = (*OPERANDS, "attn_mask")
    tensors = {x: v for x in given if (v := fake_of(n.kwargs.get(x))) is not None}
    q, ranks = tensors["query"], {tensors[x].dim() for x in OPERANDS}
    some = all(statically_known_true(s > 0) for v in tensors.values() for s in v.shape)
    if not some or ranks not in {torch.float32: ({3}, {4}), torch.float64: ()}.get(q.dtype, ({4},)):
        return
    new, after = dict(n.kwargs), []
    for x, v in tensors.items():
        is_one = bool(v.dim()) and is_same_size(v.shape[-1], 1)
        if x == "attn_mask" and is_one:  # one number for all keys
            keys = called(gm, n, "size", new["key"], -2)
            new[x] = called(gm, n, "expand", new[x], *[-1] * (v.dim() - 1), keys)
            new[x] = called(gm, n, "contiguous", new[x])
        elif isinstance(v.stride(-1), int) and v.stride(-1) != 1 and not is_one:
            new[x] = called(gm, n, "contiguous", new[x])
    if "attn_mask" in tensors or q.dtype is torch.float32:
        after += widen(gm, n, new, tensors)
    if ranks == {3}:
        for x in OPERANDS:
            new[x] = called(gm, n, "unsqueeze", new[x], 0)
        after.append(("squeeze", 0))
    if new == n.kwargs:
        return
    # Another kernel gives other strides, which are visible if a dependent value leaves the graph.
    for x, by in gradient_orders(n).items():
        first: Any = new[x]
        old: Any = n.kwargs[x]
        if first is old:
            new[x] = with_gradient(gm, n, old, by)
            continue
        while first.args[0] is not old:  # to the first reader of the operand
            first = first.args[0]
        first.args = (with_gradient(gm, first, old, by), *first.args[1:])
    written = (s for m in gm.graph.nodes if writes(m) for s in storages(*m.all_input_nodes))
    if not {*storages(n)}.isdisjoint(written):
        after.append(("clone",))  # a fused kernel's result is saved and must not be written
    shown, value = seen_by_calls(gm, [n], results=True), fake_of(n)
    order = None if value is None else dense_order(value.shape, value.stride())
    n.kwargs = new
    users, result, following = tuple(n.users), n, n.next
    for name, *args in after:
        result = called(gm, following, name, result, *args, like=n)
    if (shown is None or ranks == {3}) and order is not None:  # the backward graph sees the order
        result, shown = with_order(gm, following, result, order, n), []
    for user in users:
        user.replace_input_with(n, result)
    for user, a, by in shown or ():
        made = result if a is n else a
        user.replace_input_with(made, with_order(gm, user, made, by, a))


def widen(
    gm: GraphModule, n: Node, new: dict[str, Any], tensors: Mapping[str, Tensor]
) -> list[tuple[Any, ...]]:
    """Change `new` to fit the efficient kernel; return the calls that undo it in the result.

    It wants as many heads of keys as of queries, and heads of a multiple of WIDTH.  Zeros appended
    to queries and keys do not change their products; those of values are cut off.
    """
    q, k = tensors["query"], tensors["key"]
    heads = q.shape[-3], k.shape[-3]
    if new.get("enable_gqa") and isinstance(heads[0], int) and isinstance(heads[1], int):
        for x in ("key", "value"):
            new[x] = called(gm, n, "repeat_interleave", new[x], heads[0] // heads[1], dim=-3)
        new["enable_gqa"] = False
    undo: list[tuple[Any, ...]] = []
    for x in OPERANDS:
        size = tensors[x].shape[-1]
        if isinstance(size, int) and size % WIDTH:
            new[x] = called(gm, n, F.pad, new[x], (0, -size % WIDTH))
            if x == "query" and new.get("scale") is None:
                new["scale"] = 1 / math.sqrt(size)
            if x == "value":
                undo = [("narrow", -1, 0, size)]
    return undo
