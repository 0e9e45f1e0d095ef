"""Which steps of a plan a CUDA graph replays, and the plan that replays them.

A plan is cut where a step cannot be captured; what is between two cuts becomes a graph. The plan
around the graphs runs those steps, draws the keys of random numbers, allocates the results,
replays, and makes the views that leave a graph.

A graph has fixed addresses. Those of arguments and results are set before each replay, if only
kernels of lenz use them: their launches are nodes of the graph whose arguments may change. What a
library takes or writes is different: nobody knows where its kernels keep addresses. A `pinned`
argument (a parameter, or what the forward half has kept) is expected at its address; any other one
is copied to the graph's memory before the replay, or from there after it. Results that only the
backward half reads stay in the graph's memory (`kept`), and so do those of one graph for another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lenz.ir.graph import Atom, Named, Ref
from lenz.ir.plan import (
    Alloc,
    BindSize,
    CallStep,
    Check,
    Current,
    Free,
    Input,
    Keep,
    LaunchStep,
    Lay,
    Plan,
    Reuse,
    SizeInput,
    Step,
    ViewStep,
    launched,
)  # fmt: skip
from lenz.ir.tensor import TensorType
from lenz.plan.native_shim import names
from lenz.sym import ONE, Sym, Var

GRAPH = "cuda_graph"  # begins the names of graphs among the kernels of a plan


class Uncaptured(Exception):
    """Why no graph replays this plan."""


@dataclass(frozen=True, slots=True)
class Region:
    """What one CUDA graph replays.

    name    among the kernels of the plan around it, which gives it the addresses of `reads` and
            `writes`
    reads   arguments and buffers of other steps, whose addresses may change
    writes  memory that the plan around it allocates, or results that are copied into such memory
    kept    what stays in the graph's memory
    pinned  arguments that are expected at their addresses
    fixed   constants, and what other graphs keep
    copied  reads that are copied into the graph, and writes that are copied out of it
    mutated copied reads that are copied back
    """

    name: str
    steps: tuple[Step, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kept: tuple[str, ...]
    pinned: tuple[str, ...]
    fixed: tuple[str, ...]
    copied: frozenset[str]
    mutated: frozenset[str]


@dataclass(frozen=True, slots=True)
class Graphed:
    """The graphs of a plan on a GPU, and the plan around them; `outside` says why steps are not."""

    plan: Plan
    device: str
    regions: tuple[Region, ...]
    outside: tuple[str, ...]

    @property
    def pinned(self) -> tuple[str, ...]:
        """The arguments that graphs expect at their addresses."""
        return tuple(dict.fromkeys(n for r in self.regions for n in r.pinned))


@dataclass(slots=True)
class _Part:
    """Steps in a row: of one graph, with the keys that it takes, or outside of graphs."""

    is_graph: bool
    steps: list[Step]
    drawn: list[Step] = field(default_factory=list)


def graphed(p: Plan, find: Callable[[str], Any], moving: Collection[str] = ()) -> Graphed:
    """Split a plan into graphs and the plan around them. Raises Uncaptured.

    find    gives an op by its name; None for a function of another kind
    moving  pinned arguments that have moved all the same
    """
    arguments = {i.name for i in p.inputs if isinstance(i, Input)}
    binds = [s for s in p.steps if isinstance(s, BindSize) and s.source in arguments]
    device = _device(p.steps)
    known = {v for i in p.inputs if isinstance(i, SizeInput) for v in i.value.free_vars}
    known |= {s.var for s in binds}
    steps = [s for s in p.steps if s not in binds and not isinstance(s, Current)]
    parts, outside = _parts(steps, find, known, _places(p))
    if not any(x.is_graph for x in parts):
        raise Uncaptured(outside[0] if outside else "one kernel alone gains nothing")
    roots = _roots(steps)
    writes = _writes(p, parts, roots)
    used = {a.name for a in p.outputs if isinstance(a, Ref)}
    regions, around = list[Region](), list[list[Step]]()
    for k in reversed(range(len(parts))):
        x = parts[k]
        if not x.is_graph:
            used |= {n for s in x.steps for n in _named(s)}
            around.append(x.steps)
            continue
        chain = _chain(x, used, roots, writes)
        r = _region(f"{GRAPH}{k}", x, used, roots, writes, {s.name for s in chain})
        used |= {*r.reads, *(s.source for s in chain)}
        regions.append(r)
        allocs = [Alloc(n, writes[n]) for n in r.writes]
        launch = LaunchStep(r.name, (), (), ONE, device, graph=True)
        around.append([*x.drawn, *allocs, launch, *map(Keep, r.kept), *chain])
    found = _settled(p, moving, regions[::-1], roots)
    calls = {r.name: (*r.reads, *r.writes) for r in found}
    told = [
        replace(s, args=calls[s.kernel]) if isinstance(s, LaunchStep) and s.graph else s
        for part in reversed(around)
        for s in part
    ]
    names = {*arguments, *(c.name for c in p.constants), *(n for s in told for n in _defined(s))}
    told = [s for s in told if not isinstance(s, Free) or s.name in names]
    whole = (*binds, Current(device), *told)
    plan = replace(p, steps=whole, kernels=launched(whole), comments=())
    return Graphed(plan, device, tuple(found), tuple(dict.fromkeys(outside)))


def _places(p: Plan) -> dict[int, str]:
    """Where launches and calls come from, by the identity of the step: the user's line."""
    found: dict[int, str] = {}
    for k, text in p.comments:
        step = next(s for s in p.steps[k:] if isinstance(s, LaunchStep | CallStep))
        line = text.partition(", ")[0]
        if ":" in line:
            found[id(step)] = f" ({line})"
    return found


def _parts(
    steps: Sequence[Step],
    find: Callable[[str], Any],
    known: Collection[Var],
    places: Mapping[int, str],
) -> tuple[list[_Part], list[str]]:
    """Cut the steps where one cannot be captured; why and where, for each of these."""
    parts, outside, own = [_Part(True, [])], list[str](), set[str]()
    drawn = {n for s in steps if _draws(s) for n in _defined(s)}
    for s in steps:
        if _draws(s) or (isinstance(s, Lay) and s.name in drawn):
            parts[-1].drawn.append(s)
        elif isinstance(s, Lay) and s.name not in own:
            parts += [_Part(False, [s]), _Part(True, [])]  # it looks at what another step gives
            own = set()
        elif why := _refusal(s, find, known):
            parts += [_Part(False, [s]), _Part(True, [])]
            outside.append(why + places.get(id(s), ""))
            own = set()
        else:
            parts[-1].steps.append(s)
            own |= {*_defined(s)}
    for x in parts:
        x.is_graph = sum(isinstance(s, LaunchStep | CallStep) for s in x.steps) > 1
        if not x.is_graph:
            x.steps, x.drawn = [*x.drawn, *x.steps], []
    return [x for x in parts if x.steps], outside


def _writes(p: Plan, parts: Sequence[_Part], roots: Mapping[str, str]) -> dict[str, TensorType]:
    """What graphs write into memory of the caller's, with its type.

    That is the first buffer of a result's memory where the plan has allocated it. What a library
    has allocated, or a view of it, is copied by its own type.
    """
    inside = [s for x in parts if x.is_graph for s in x.steps]
    made = {s.name: s.type for s in inside if isinstance(s, Alloc)}
    own = {n for s in inside for n in _defined(s)}
    found, taken = dict[str, TensorType](), list[str]()
    for k, (a, type) in enumerate(zip(p.outputs, p.results, strict=True)):
        if not isinstance(a, Ref) or k in p.saved or a.name not in own:
            continue
        root = roots.get(a.name, a.name)
        if root in made:
            found[root] = made[root]
        elif root in own and type is not None:
            found[a.name] = type
            taken.append(root)
    if len({*taken}) < len(taken):
        raise Uncaptured("two results are views of what a library has made")
    return found


def _chain(
    x: _Part, used: Collection[str], roots: Mapping[str, str], writes: Collection[str]
) -> list[Reuse | ViewStep]:
    """The views that the plan around a graph makes again: of memory that is not the graph's."""
    own = {n for s in x.steps for n in _defined(s)}
    wanted, found = {*used}, list[Reuse | ViewStep]()
    for s in reversed(x.steps):
        if isinstance(s, Reuse | ViewStep) and s.name in wanted and s.name not in writes:
            root = roots[s.name]
            if root in writes or root not in own:
                found.append(s)
                wanted.add(s.source)
    return found[::-1]


def _region(
    name: str,
    x: _Part,
    used: Collection[str],
    roots: Mapping[str, str],
    writes: Collection[str],
    chain: Collection[str],
) -> Region:
    """A graph, whose `reads` are all that it takes from elsewhere."""
    own = dict.fromkeys(n for s in x.steps for n in _defined(s))
    taken = tuple(dict.fromkeys(n for s in x.steps for n in _named(s) if n not in own))
    fresh = tuple(n for n in own if n in writes)
    kept = tuple(
        n
        for n in own
        if n in used and n not in chain and n not in writes and roots.get(n, n) not in writes
    )
    return Region(name, tuple(x.steps), taken, fresh, kept, (), (), frozenset(), frozenset())


def _settled(
    p: Plan, moved: Collection[str], regions: Sequence[Region], roots: Mapping[str, str]
) -> list[Region]:
    """The graphs with what each takes by kind, and with what is copied."""
    tensors = [i for i in p.inputs if isinstance(i, Input)]
    pinned = {i.name for i in tensors if i.pinned and i.name not in moved}
    # What one graph keeps for another is copied back as well.
    last = {i.name for i in tensors if not i.written}
    fixed = {c.name for c in p.constants} | {n for r in regions for n in r.kept}
    found = []
    for r in regions:
        made = {s.name for s in r.steps if isinstance(s, Alloc) and not s.zero}
        reads = tuple(n for n in r.reads if n not in fixed and n not in pinned)
        touched = {roots.get(n, n) for s in r.steps for n in _handled(s)}
        moving = [roots.get(n, n) for n in (*reads, *r.writes)]
        copied = frozenset(n for n in (*reads, *r.writes) if roots.get(n, n) in touched)
        copied |= {n for n in r.writes if n not in made}
        if any(moving.count(roots.get(n, n)) > 1 for n in copied):
            raise Uncaptured("what is copied into a graph has two names")
        back = frozenset(n for n in copied if n in reads and n not in last)
        pins = tuple(n for n in r.reads if n in pinned)
        rest = tuple(n for n in r.reads if n in fixed)
        found.append(replace(r, reads=reads, pinned=pins, fixed=rest, copied=copied, mutated=back))
    return found


def _defined(s: Step) -> tuple[str, ...]:
    """The buffers that a step makes."""
    match s:
        case Alloc() | Keep() | Reuse() | ViewStep():
            return (s.name,)
        case CallStep() if not s.into:
            return tuple(o for o in s.outs if isinstance(o, str))
        case _:
            return ()


def _draws(s: Step) -> bool:
    """Whether a step makes the key of random numbers, which depends on nothing."""
    return isinstance(s, CallStep) and s.draws == "key"


def _device(steps: Sequence[Step]) -> str:
    named = [s.device for s in steps if isinstance(s, Current)]
    named += [s.type.device for s in steps if isinstance(s, Alloc | Lay)]
    found = list(dict.fromkeys(d for d in named if d.startswith("cuda")))
    if len(found) != 1:
        raise Uncaptured("it runs on more than one GPU" if found else "it has no kernel of a GPU")
    return found[0]


def _refusal(s: Step, find: Callable[[str], Any], known: Collection[Var]) -> str:
    """Why a graph cannot hold this step; "" if it can."""
    if not _sizes(s) <= {*known}:
        return "its sizes depend on values"
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
    return f"{s.op} draws random numbers" if s.draws else ""


def _roots(steps: Sequence[Step]) -> dict[str, str]:
    """For each buffer in the memory of another one: the first buffer of that memory."""
    roots: dict[str, str] = {}
    for s in steps:
        if isinstance(s, Reuse | ViewStep):
            roots[s.name] = roots.get(s.source, s.source)
    return roots


def _sizes(s: Step) -> set[Var]:
    """The variables in the sizes of a step."""
    match s:
        case Alloc() | Reuse() | ViewStep() | Lay():
            told = (*s.type.shape, *s.type.layout.stride, s.type.layout.offset)
        case LaunchStep():
            told = (*s.sizes, *(() if s.grid is None else (s.grid,)))
        case CallStep():
            told = tuple(x for a in (*s.args, *(a for _, a in s.kwargs)) for x in _numbers(a))
        case _:
            told = ()
    return {v for x in told for v in x.free_vars}


def _numbers(a: Atom) -> list[Sym]:
    """The sizes in an argument."""
    if isinstance(a, tuple):
        return [x for part in a for x in _numbers(part)]
    return [a] if isinstance(a, Sym) else []


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
