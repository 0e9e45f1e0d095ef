"""Tensors that are filled part by part: a part is read as it was written, and all are one join.

    y = select_scatter(x, a, 0, 1); z = select_scatter(y, select(y, 0, 1) + 1, 0, 2)
        ==>  z = cat([x[:1], a[None], (a + 1)[None], x[3:]])

Each write makes a new tensor here, and so does the gradient of each read. A loop over T steps that
reads or fills a row of T with each copied T x T of them: 45 ms for 192 steps in which eager fills
rows in 16, and 3.4 as a join.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from lenz.frontend.calls import inserter, storages
from lenz.frontend.values import are_same, unguarded
from lenz.traits import arguments

aten = torch.ops.aten
READS = (aten.select.int, aten.slice.Tensor)
WRITES = (aten.select_scatter.default, aten.slice_scatter.default)
GRADIENTS = (aten.select_backward.default, aten.slice_backward.default)
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)

Span: TypeAlias = tuple[int, int, int]
Spans: TypeAlias = Mapping[Node, Span]


def join_parts(graph: Graph, seen: Set[int], changing: Set[int]) -> None:
    """Rewrite reads and writes of parts, in place.

    Storages that are `changing` are written by later calls; `seen` ones leave the graph with their
    layout.
    """
    every = (*READS, *WRITES, *GRADIENTS)
    spans = {n: at for n in graph.nodes if n.target in every and (at := span_of(n))}
    # A read goes past writes whose base has the same strides and does not change.
    old = {n: n.all_input_nodes[0] for n in spans if n.target in WRITES}
    old = {n: x for n, x in old.items() if changing.isdisjoint(storages(x))}
    old = {n: x for n, x in old.items() if are_same(*(v.meta["val"].stride() for v in (n, x)))}
    for n in graph.nodes:
        if n.target in READS and (seen | changing).isdisjoint(storages(n)):
            _read_as_written(n, spans, old, changing)
            if not n.users:
                graph.erase_node(n)
    for n in graph.nodes:
        after = [u.target for u in n.users if n in u.args[:1] or u.target is aten.add.Tensor]
        if n.target in WRITES and not any(t in WRITES for t in after):
            _join_writes(graph, n, spans, changing)
        elif n.target is aten.add.Tensor and after != [n.target]:
            _join_gradients(graph, n, spans, changing)


def span_of(n: Node) -> Span | None:
    """Return the dimension, the first position and the end of a part; None if not all are known."""
    given = {a.name: v for a, v in arguments(n)}
    shape = (n.all_input_nodes[0] if n.target in READS else n).meta["val"].shape
    d = given["dim"] % max(len(shape), 1)  # of a number, which eager refuses, a part is not known
    at = [given[k] for k in ("index", "start", "end", "step") if k in given]
    if not shape or not all(isinstance(v, int | None) for v in (shape[d], *at)):
        return None
    if "index" in given:
        return d, at[0] % shape[d], at[0] % shape[d] + 1
    low, high, step = slice(*at).indices(shape[d])
    return (d, low, max(low, high)) if step == 1 else None


def _part(write: Node) -> Any:
    """The tensor that is written, without a copy that has the strides of its place."""
    part: Any = write.args[1 if write.target in WRITES else 0]
    source = part.args[1] if part.target is aten.copy.default else part
    return source if _are_alike(part, source) else part


def _are_alike(x: Node, y: Node) -> bool:
    """Say whether two tensors have one type, device and shape."""
    a, b = (v.meta["val"] for v in (x, y))
    return a.dtype == b.dtype and a.device == b.device and are_same(a.shape, b.shape)


def _is_apart(at: Span | None, others: Iterable[Span]) -> bool:
    """Say whether a part is known, and has no element of the others."""
    return at is not None and all(at[0] == d and (at[2] <= a or b <= at[1]) for d, a, b in others)


def _read_as_written(n: Node, spans: Spans, old: Mapping[Node, Node], changing: Set[int]) -> None:
    """Read a part from what was written there, or from the tensor before writes to other parts."""
    x = y = n.all_input_nodes[0]
    while n in spans and x in spans and x.target in WRITES:
        part = _part(x)
        is_free = changing.isdisjoint(storages(part)) and _are_alike(n, part)  # a write converts
        if spans[x] == spans[n] and READS.index(n.target) == WRITES.index(x.target) and is_free:
            # Views would show that its strides differ.
            n.replace_all_uses_with(part, delete_user_cb=_reads_elements)
        if x not in old or not _is_apart(spans[n], [spans[x]]):
            break
        x = old[x]
    n.replace_input_with(y, x)


def _reads_elements(n: Node) -> bool:
    return n.target in PRODUCTS or torch.Tag.pointwise in getattr(n.target, "tags", ())


def _join_writes(graph: Graph, n: Node, spans: Spans, changing: Set[int]) -> None:
    """Replace a chain of writes that ends here, and of which nothing else is read."""
    parts, y = dict[Span, Node](), n
    while y.target in WRITES and (y is n or len(y.users) == 1) and _is_apart(spans.get(y), parts):
        parts[spans[y]], y = y, y.all_input_nodes[0]
    base = y
    while base.target in WRITES:
        base = base.all_input_nodes[0]
    if base.op == "call_function":  # only a part of an argument is written
        _join(graph, n, y, parts, (), changing)


def _join_gradients(graph: Graph, n: Node, spans: Spans, changing: Set[int]) -> None:
    """Replace a sum of gradients of reads, which are 0 but for a part, and of one other at most."""
    parts, others, stack = dict[Span, Node](), list[Node](), [n]
    while stack:
        x = stack.pop()
        is_own = x is n or len(x.users) == 1
        if is_own and x.target is aten.add.Tensor and _is_plain(x):
            stack += reversed(x.all_input_nodes)
        elif is_own and x.target in GRADIENTS and _is_apart(spans.get(x), parts):
            parts[spans[x]] = x
        else:
            others.append(x)
    if len(others) < 2 and parts:
        _join(graph, n, next(iter(parts.values())), parts, others, changing)


def _is_plain(n: Node) -> bool:
    """Say whether a sum has two terms of its own shape."""
    terms = [v.meta["val"] for v in n.all_input_nodes]
    shapes = [v.shape for v in (n.meta["val"], *terms) if isinstance(v, torch.Tensor)]
    return len(shapes) == 3 and not n.kwargs and all(are_same(shapes[0], s) for s in shapes)


def _join(
    graph: Graph, n: Node, y: Node, parts: Mapping[Span, Node], others: Sequence[Node],
    changing: Set[int],
) -> None:  # fmt: skip
    """Put a join, and others added to it, in the place of `n`; y is what lies between the parts."""
    value, read = n.meta["val"], [_part(w) for w in parts.values()]
    is_alike = all(x.meta["val"].dtype == value.dtype for x in read) and value.is_contiguous()
    # Fewer parts are one map.
    if len(parts) < 4 or not is_alike or not changing.isdisjoint(storages(y, *read, *others)):
        return
    call, rows, end, d = inserter(graph, n), list[Node](), 0, min(parts)[0]
    last = ((d, value.shape[d], value.shape[d]), None)
    with graph.inserting_before(n), unguarded(value.fake_mode):
        for (_, low, high), write in [*sorted(parts.items()), last]:
            if end < low:
                rows.append(call(aten.slice.Tensor, y, d, end, low))
            end = high
            if write is not None:
                part, is_one = _part(write), write.target in (WRITES[0], GRADIENTS[0])
                rows.append(call(aten.unsqueeze.default, part, d) if is_one else part)
        new = call(aten.cat.default, rows, d)
        for x in others:
            new = call(aten.add.Tensor, new, x)
    n.replace_all_uses_with(new)
