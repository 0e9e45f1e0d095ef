"""The sizes and strides of each buffer in a plan, chosen so that few tensors are made.

A kernel takes an address; only calls, views and results need sizes and strides. A buffer that only
kernels use keeps the tensor whose memory it reuses. A buffer that is only used through views is
allocated in the form of its first view. A tensor costs 1 to 2 us of host time. A view used only by
calls costs less than one visible to autograd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from lenz.ir.graph import Atom, Ref, atom_refs, names_in
from lenz.ir.plan import Alias, Alloc, CallStep, Lay, Plan, Reuse, Step, ViewStep, owners_of
from lenz.ir.tensor import TensorType
from lenz.runtime import executor
from lenz.sym import ZERO


def formed(p: Plan) -> Plan:
    """The plan with steps that distinguish new tensors from renamed ones."""
    found, steps = forms_of(p), list[Step]()
    returned = {a.name for a in p.outputs if isinstance(a, Ref)}
    for s in p.flat:
        match s:
            case Alloc(name):
                s = replace(s, type=found[name])
            case Reuse(name, source):
                t, is_cut = found[name], name in returned
                same = same_form(t, found[source])
                s = replace(s, type=t, same=same, detached=is_cut and not same)
            case ViewStep(name, source) if source in found:
                same = same_form(s.type, found[source])
                s = replace(s, same=same and (s.detached or name not in returned))
        steps.append(s)
    return replace(p, steps=tuple(taken(p.outputs, steps)))


def taken(outputs: Iterable[Atom], steps: Sequence[Step]) -> Iterable[Step]:
    """The steps; each new name for old memory says who uses it.

    Autograd sees results, tensors written by ops, and the bases of both. A result that alone has
    new memory needs no base.
    """
    seen = {r for a in outputs for r in atom_refs(a)}
    named, found, lone = set(seen), list[Step](), alone(seen, steps)
    for s in reversed(steps):
        match s:
            case CallStep():
                named.update(_named(s))
                seen.update(_named(s) if s.writes else ())
            case Lay():
                named.add(s.name)
            case Alias():
                is_seen, is_named = s.name in seen and s.name not in lone, s.name in named
                s = replace(s, taker="autograd" if is_seen else "calls" if is_named else "kernels")
                seen.update([s.source] * is_seen)
                # The offset of a view counts elements.
                named.update([s.source] * (isinstance(s, ViewStep) or (s.same and is_named)))
        found.append(s)
    return reversed(found)


def alone(results: Collection[str], steps: Sequence[Step]) -> set[str]:
    """The results in memory of the plan that no other tensor of the caller or of autograd has.

    A call that writes, or that may return its argument, makes another tensor.
    """
    owners, own = owners_of(steps), {s.name for s in steps if isinstance(s, Alloc)}
    roots = {n: owners.get(n, n) for n in results}
    makers = [s for s in steps if isinstance(s, CallStep) and (s.writes or returns_argument(s))]
    shown = Counter([*roots.values(), *(owners.get(n, n) for s in makers for n in _named(s))])
    return {n for n, root in roots.items() if root in own and shown[root] == 1}


def forms_of(p: Plan) -> dict[str, TensorType]:
    """The form of every buffer that the plan allocates, by name."""
    called = {*atom_refs(p.outputs)}
    views: dict[str, list[TensorType]] = {}
    for s in p.steps:
        if isinstance(s, CallStep):
            called.update(_named(s))
        elif isinstance(s, Lay):
            called.add(s.name)
        elif isinstance(s, ViewStep):
            views.setdefault(s.source, []).append(s.type)
    found: dict[str, TensorType] = {}
    for s in p.steps:
        if isinstance(s, (Alloc, Reuse)):
            found[s.name], seen = s.type, views.get(s.name, [])
            if s.name not in called:
                usual = found[s.source] if isinstance(s, Reuse) and not seen else s.type
                found[s.name] = next((t for t in seen if _whole(t, s.type)), usual)
    return found


def same_form(a: TensorType, b: TensorType) -> bool:
    """True if two forms are equal: dtype, sizes, strides and offset."""
    x, y = a.layout, b.layout
    return a.dtype is b.dtype and (x.shape, x.stride, x.offset) == (y.shape, y.stride, y.offset)


def _whole(view: TensorType, base: TensorType) -> bool:
    """True if the view spans all memory of the base, for all sizes.

    A view with a size 0 has no memory. A size of the view alone may be found after the allocation.
    """
    x, y = view.layout, base.layout
    is_full = x.numel is y.numel or all((n.lo or 0) > 0 for n in x.shape)
    is_known = {v for s in x.syms for v in s.free_vars} <= {v for s in y.syms for v in s.free_vars}
    is_same = view.dtype is base.dtype and x.offset is ZERO and x.storage is y.storage
    return is_same and is_full and is_known


def returns_argument(s: CallStep) -> bool:
    """Whether a call may return an argument, or a view of one."""
    if s.into or not s.op.startswith("aten."):
        return not s.into
    op: Any = executor.resolve(s.op, direct=False)
    return any(r.alias_info is not None for r in op._schema.returns)


def _named(s: CallStep) -> Iterable[str]:
    return (*names_in(s), *(o for o in s.outs if isinstance(o, str)))
