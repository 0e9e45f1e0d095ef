"""Which steps of a plan a CUDA graph replays, and the plan that replays them.

All steps of a plan that run on one GPU become one graph. The plan around it draws the keys of
random numbers, allocates the results, replays, and makes the views that leave.

A graph has fixed addresses. Those of arguments and results are set before each replay, if only
kernels of lenz use them: their launches are nodes of the graph whose arguments may change. What a
library takes or writes is different: nobody knows where its kernels keep addresses. A `pinned`
argument (a parameter, or what the forward half has kept) is expected at its address; any other one
is copied to the graph's memory before the replay, or from there after it. Results that only the
backward half reads stay in the graph's memory (`kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lenz.ir.graph import Named, Ref
from lenz.ir.plan import (
    Alloc,
    BindSize,
    CallStep,
    Check,
    Current,
    Input,
    Keep,
    LaunchStep,
    Lay,
    Plan,
    Reuse,
    SizeInput,
    Step,
    ViewStep,
)  # fmt: skip
from lenz.ir.tensor import TensorType
from lenz.plan.native_shim import names
from lenz.sym import ONE, Var

GRAPH = "cuda_graph"  # the name of the graph among the kernels of its plan


class Uncaptured(Exception):
    """Why no graph replays this plan."""


@dataclass(frozen=True, slots=True)
class Graphed:
    """What a CUDA graph replays, and how.

    plan    what runs around it: it launches `GRAPH` with the addresses of `reads` and `writes`
    device  the GPU
    inner   the steps of the graph
    reads   arguments, and results of steps before the graph, whose addresses may change
    writes  memory that results get, by the name of its first buffer, with its type
    kept    the first buffers of results that stay in the graph's memory
    pinned  arguments that are expected at their addresses
    copied  reads that are copied into the graph, and writes that are copied out of it
    """

    plan: Plan
    device: str
    inner: tuple[Step, ...]
    reads: tuple[str, ...]
    writes: Mapping[str, TensorType]
    kept: tuple[str, ...]
    pinned: tuple[str, ...]
    copied: frozenset[str]


def graphed(
    p: Plan,
    find: Callable[[str], Any],
    pinned: Collection[str],
    results: Sequence[TensorType | None],
    saved: Collection[int] = (),
) -> Graphed:
    """Split a plan into a graph and the plan around it.

    `find` gives an op by its name, `pinned` names arguments that keep their addresses, `results`
    are the types of results, and `saved` the places of those that only the backward half reads.
    Raises Uncaptured.
    """
    arguments = {i.name for i in p.inputs if isinstance(i, Input)}
    early = [(isinstance(s, BindSize) and s.source in arguments) or _draws(s) for s in p.steps]
    before = tuple(s for s, is_early in zip(p.steps, early, strict=True) if is_early)
    inner = tuple(s for s, is_early in zip(p.steps, early, strict=True) if not is_early)
    device = _device(inner)
    if sum(isinstance(s, LaunchStep | CallStep) for s in inner) < 2:
        raise Uncaptured("one kernel alone gains nothing")
    known = {v for i in p.inputs if isinstance(i, SizeInput) for v in i.value.free_vars}
    known |= {s.var for s in before if isinstance(s, BindSize)}
    for s in inner:
        if why := _refusal(s, find, known):
            raise Uncaptured(why)
    roots = _roots(inner)
    types = {s.name: s.type for s in (*p.inputs, *p.constants) if isinstance(s, Input)}
    given = {*types, *(o for s in before if isinstance(s, CallStep) for o in s.outs)}
    touched = {roots.get(n, n) for s in inner for n in _handled(s)}
    made = {s.name: s for s in inner if isinstance(s, Alloc)}
    kept, writes = _results(p, roots, given, {n: a.type for n, a in made.items()}, results, saved)
    used = dict.fromkeys(n for s in inner for n in _named(s))
    fixed = {*pinned, *(c.name for c in p.constants)}
    reads = tuple(n for n in used if n in given and n not in fixed)
    copied = frozenset(n for n in (*reads, *writes) if n in touched)
    copied |= {n for n in writes if n not in made or made[n].zero}
    pins = tuple(n for n in used if n in pinned)
    g = Graphed(p, device, inner, reads, writes, kept, pins, copied)
    return replace(g, plan=_around(p, g, before, roots))


def _results(
    p: Plan,
    roots: Mapping[str, str],
    given: Collection[object],
    made: Mapping[str, TensorType],
    types: Sequence[TensorType | None],
    saved: Collection[int],
) -> tuple[tuple[str, ...], dict[str, TensorType]]:
    """What the graph keeps, and what it writes into memory of the caller's.

    That is the first buffer of the memory where the plan has allocated it. What a library has
    allocated, or a view of it, is copied by its own type.
    """
    kept, writes, taken = list[str](), dict[str, TensorType](), list[str]()
    for k, (a, t) in enumerate(zip(p.outputs, types, strict=True)):
        if not isinstance(a, Ref) or (root := roots.get(a.name, a.name)) in given:
            continue
        if k in saved:
            kept.append(root)
        elif root in made:
            writes[root] = made[root]
        elif t is not None:
            writes[a.name] = t
            taken.append(root)
    if len({*taken}) < len(taken):
        raise Uncaptured("two results are views of what a library has made")
    return tuple(dict.fromkeys(n for n in kept if n not in writes)), writes


def _draws(s: Step) -> bool:
    """Whether a step makes the key of random numbers, which depends on nothing."""
    return isinstance(s, CallStep) and s.op == "lenz.seed"


def _device(steps: tuple[Step, ...]) -> str:
    named = [s.device for s in steps if isinstance(s, Current)]
    named += [s.type.device for s in steps if isinstance(s, Alloc | Lay)]
    found = list(dict.fromkeys(d for d in named if d.startswith("cuda")))
    if len(found) != 1:
        raise Uncaptured("it runs on more than one GPU" if found else "it has no kernel of a GPU")
    return found[0]


def _refusal(s: Step, find: Callable[[str], Any], known: Collection[Var]) -> str:
    """Why a graph cannot hold this step; "" if it can."""
    match s:
        case LaunchStep(grid=None) | Check():
            return "a kernel runs on the CPU"
        case Alloc() if not s.type.device.startswith("cuda"):
            return "it allocates memory of the CPU"
        case BindSize():
            return f"{s.source} has a size that only the call tells"
        case CallStep():
            return _refused_call(s, find, known)
    return ""


def _refused_call(s: CallStep, find: Callable[[str], Any], known: Collection[Var]) -> str:
    op = find(s.op)
    if op is None or not s.op.startswith("aten."):
        return f"{s.op} may do anything"
    if s.holds or s.waits:
        return f"{s.op} is a collective"
    if any(isinstance(o, Var) and o not in known for o in s.outs):
        return f"{s.op} gives numbers to the CPU"
    if not s.into and any(r.alias_info is not None for r in op._schema.returns):
        return f"{s.op} gives an alias of its argument"
    named = [a for a in (*s.args, *(a for _, a in s.kwargs)) if isinstance(a, Named)]
    if any(a.kind == "device" and a.value.startswith("cpu") for a in named):
        return f"{s.op} works on the CPU"
    if torch.Tag.cudagraph_unsafe in op.tags:
        return f"{s.op} is tagged as unsafe for CUDA graphs"
    if torch.Tag.nondeterministic_seeded in op.tags and _chance(s, op._schema) != 0:
        return f"{s.op} draws random numbers"
    return ""


def _chance(s: CallStep, schema: Any) -> object:
    """The probability of an attention's dropout, which draws nothing if it is 0."""
    given = dict(zip((a.name for a in schema.arguments), s.args, strict=False)) | dict(s.kwargs)
    usual = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return {**usual, **given}.get("dropout_p")


def _roots(steps: tuple[Step, ...]) -> dict[str, str]:
    """For each buffer in the memory of another one: the first buffer of that memory."""
    roots: dict[str, str] = {}
    for s in steps:
        if isinstance(s, Reuse | ViewStep):
            roots[s.name] = roots.get(s.source, s.source)
    return roots


def _named(s: Step) -> tuple[str, ...]:
    """The buffers that a step uses."""
    match s:
        case Reuse() | ViewStep():
            return (s.source,)
        case LaunchStep():
            return s.args
        case CallStep():
            return tuple(names(s))
        case _:
            return ()


def _handled(s: Step) -> tuple[str, ...]:
    """The buffers whose addresses a library may keep."""
    return tuple(names(s)) if isinstance(s, CallStep) else ()


def _around(p: Plan, g: Graphed, before: tuple[Step, ...], roots: Mapping[str, str]) -> Plan:
    """The plan that replays a graph."""
    results = {a.name for a in p.outputs if isinstance(a, Ref)}
    after: list[Step] = []
    for s in reversed(g.inner):
        if isinstance(s, Reuse | ViewStep) and s.name in results and s.name not in g.writes:
            after.append(s)
            results.add(s.source)
    steps = [
        *before,
        Current(g.device),
        *(Alloc(name, t) for name, t in g.writes.items()),
        LaunchStep(GRAPH, (*g.reads, *g.writes), (), ONE, g.device, graph=True),
        *(Keep(name) for name in g.kept),
        *reversed(after),
    ]
    return replace(p, steps=tuple(steps), kernels=(GRAPH,), comments=())
