"""The memory of a scatter: it becomes a copy of its base, and updates in place.

    %y = scatter add (i: 6) (%x, [@0]; @0 = ..) { .. }
    ==>  map %y = %x  (which fuses with whatever computes %x);  update %y in place

There is no copy if the result is written back to an input whose old elements are no longer needed,
or if the base is the result of another scatter that only this one reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from lenz.ir import graph as ir
from lenz.ir.axes import old_reads
from lenz.ir.expr import nodes_of
from lenz.ir.tensor import Buffer, Layout
from lenz.schedule.nest import Nest, nest_of


def homes(g: ir.Graph, layouts: Mapping[str, Layout]) -> dict[str, str]:
    """For each scatter, the buffer in whose memory it works, if not its own."""
    found: dict[str, str] = {}
    scatters = [(k, n) for k, n in enumerate(g.nodes) if isinstance(n, ir.Scatter)]
    returned = {*ir.atom_refs(g.outputs)}
    written = {m.value for m in g.mutations}
    uses = Counter(name for n in g.nodes for name in ir.reads_of(n))
    for _, n in reversed(scatters):
        own = n.out.name
        after = [s for _, s in scatters if s.base == own and own not in old_reads(s)]
        if not after or uses[own] != 1 or own in returned | written:
            continue
        into = after[0].out.name
        if layouts[own] == layouts[into]:
            found[own] = found.get(into, into)
    for m in g.mutations:
        chain = [(k, n) for k, n in scatters if found.get(n.out.name, n.out.name) == m.value]
        if not chain or chain[-1][1].out.name != m.value or layouts[m.value] != layouts[m.input]:
            continue
        if any(e.op.guarded for _, s in chain for e in nodes_of(s.value)):
            continue  # eager writes nothing to an argument if reading the new values fails
        first, n = chain[0]
        if n.base == m.input and not _is_needed(g, m.input, first) and not _escapes(g, m.value):
            found.update((s.out.name, m.input) for _, s in chain)
    return found


def _is_needed(g: ir.Graph, name: str, at: int) -> bool:
    """True if node number `at`, or a later one, may read the old elements of an input.

    A view reads nothing. If it is returned, or the input itself, it shows the new elements.
    """
    shared = _sharing(g, name)
    views = {name}
    views.update(n.out.name for n in g.nodes if isinstance(n, ir.View) and n.source in views)
    n = g.nodes[at]
    assert isinstance(n, ir.Scatter)
    reads = {r for x in g.nodes[at + 1 :] if not isinstance(x, ir.View) for r in ir.reads_of(x)}
    ends = {*ir.atom_refs(g.outputs)} - views | {m.value for m in g.mutations}
    return bool(shared & (reads | old_reads(n) | ends))


def _escapes(g: ir.Graph, name: str) -> bool:
    """True if the value, or a possible alias of it, is returned or written elsewhere."""
    shared = _sharing(g, name)
    if any(m in shared for n in g.nodes if isinstance(n, ir.Extern) for m in n.mutates):
        return True
    returned = {*ir.atom_refs(g.outputs)}
    return bool(shared & returned) or sum(m.value in shared for m in g.mutations) > 1


def _sharing(g: ir.Graph, name: str) -> set[str]:
    """A buffer, and those that may share its memory."""
    memory = dict[str, tuple[str, ...]]()
    for n in g.nodes:
        if isinstance(n, ir.View | ir.Extern):
            ir.note_memory(n, memory)
    return {name, *(x for x, others in memory.items() if name in others)}


def parts_of(
    n: ir.Scatter, at: str, buffers: Mapping[str, Buffer], roots: Mapping[str, str]
) -> list[Nest]:
    """The nests of a scatter in the memory of buffer `at`: the copy, if any, and the updates."""
    layouts = {name: b.type.layout for name, b in buffers.items()}
    into = replace(buffers[at], origin=n.out.origin)
    parts: list[Nest] = []
    if roots.get(n.base, n.base) != at:
        parts.append(nest_of(ir.copying(n.base, into), layouts, roots))
    updates = replace(n, out=replace(into, name=f"{n.out.name}.put"))
    return [*parts, nest_of(updates, layouts, roots, at)]
