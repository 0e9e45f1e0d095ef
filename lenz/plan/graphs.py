"""The CUDA graphs of a plan's regions, and the plan that replays them.

The outer plan runs the steps outside the graphs, draws random keys, allocates the results, replays,
and makes the views that leave a graph.

A graph has fixed addresses. If only lenz's kernels use an argument or result, its address is set
before each replay: the launches are graph nodes with updatable parameters. Operands of library
calls are different: nobody knows where their kernels keep addresses. A `pinned` argument (a
parameter, or a saved tensor) is assumed at its address; any other one is copied to the graph's
memory before the replay, or from there after it. Results that only the backward half or another
graph reads stay in the graph's memory (`kept`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lenz.ir import plan as ir
from lenz.ir.graph import Named, Ref, names_in
from lenz.ir.tensor import TensorType
from lenz.records import dataclass, replace
from lenz.sym import ONE
from lenz.traits import trait

GRAPH = "cuda_graph"  # prefix of graph names among a plan's kernels


class Uncaptured(Exception):
    """The reason why no graph can replay this plan."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The part of a plan that one CUDA graph replays.

    name    its name among the kernels of the outer plan, which passes the addresses of `reads` and
            `writes`
    reads   arguments and buffers of other steps, whose addresses may change
    writes  memory that the outer plan allocates, or results copied into such memory
    kept    buffers that stay in the graph's memory
    pinned  arguments assumed at fixed addresses
    fixed   constants, and buffers kept by other graphs
    copied  reads copied into the graph, and writes copied out of it
    mutated copied reads that are also copied back
    """

    name: str
    steps: tuple[ir.Step, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kept: tuple[str, ...]
    pinned: tuple[str, ...]
    fixed: tuple[str, ...]
    copied: frozenset[str]
    mutated: frozenset[str]

    @property
    def draws(self) -> bool:
        """Whether its library calls draw random numbers."""
        calls = [s for s in self.steps if isinstance(s, ir.CallStep) and s.draws]
        return any(trait(s.op, "replayed") == "drawn" for s in calls)


@dataclass(frozen=True, slots=True)
class Graphed:
    """The graphs of a plan, and the outer plan; `outside` says why steps are not in graphs."""

    plan: ir.Plan
    device: str
    replays: tuple[Replay, ...]
    outside: tuple[str, ...]

    @property
    def pinned(self) -> tuple[str, ...]:
        """The arguments that graphs assume at fixed addresses."""
        return tuple(dict.fromkeys(n for r in self.replays for n in r.pinned))


def graphed(p: ir.Plan, moved: Collection[str] = ()) -> Graphed:
    """The graphs of a plan with regions, and the outer plan. Raises Uncaptured.

    Pinned arguments that have `moved` may be anywhere.
    """
    parts = [s if isinstance(s, ir.Region) else ir.Region("outside", (s,)) for s in p.steps]
    places, inside = _places(p), [x for x in parts if x.kind == "graph"]
    outside = [x.why + places.get(id(next(iter(x.steps), None)), "") for x in parts if x.why]
    if not inside:
        raise Uncaptured(outside[0])
    binds, roots = p.binds, ir.owners_of(p.flat)
    writes = _writes(p, inside, roots)
    used = {a.name for a in p.outputs if isinstance(a, Ref)}
    replays, around = list[Replay](), list[list[ir.Step]]()
    for x in reversed(parts):
        if x.kind != "graph":
            used |= {n for s in x.steps for n in ir.used(s)}
            around.append([s for s in x.steps if not isinstance(s, ir.Current) and s not in binds])
            continue
        chain = _chain(x, used, roots, writes)
        name = f"{GRAPH}{len(inside) - len(replays) - 1}"
        r = _replay(name, x, used, roots, writes, {s.name for s in chain})
        used |= {*r.reads, *(s.source for s in chain)}
        replays.append(r)
        allocs = [ir.Alloc(n, writes[n]) for n in r.writes]
        launch = ir.LaunchStep(r.name, (), (), ONE, x.device, graph=True)
        renew = ir.CallStep("lenz.renew", (Named("obj", r.name),), (), (), single=False)
        around.append([*allocs, *[renew] * r.draws, launch, *map(ir.Keep, r.kept), *chain])
    found = _settled(p, moved, replays[::-1], roots)
    calls = {r.name: (*r.reads, *r.writes) for r in found}
    told = [
        replace(s, args=calls[s.kernel]) if isinstance(s, ir.LaunchStep) and s.graph else s
        for part in reversed(around)
        for s in part
    ]
    names = {*p.tensors, *(c.name for c in p.constants), *(n for s in told for n in ir.defined(s))}
    told = [s for s in told if not isinstance(s, ir.Free) or s.name in names]
    device = inside[0].device
    # Attention's seeds are on the CPU unless it is captured, and no graph can read them there.
    read = {n for r in found for n in (*r.reads, *r.pinned)}
    here = {i: replace(i, anywhere=False) for n, i in p.tensors.items() if n in read}
    whole = (*binds, ir.Current(device), *told)
    inputs = tuple([here.get(i, i) if isinstance(i, ir.Input) else i for i in p.inputs])
    plan = replace(p, inputs=inputs, steps=whole, kernels=ir.launched(whole), comments=())
    return Graphed(plan, device, tuple(found), tuple(dict.fromkeys(outside)))


def _places(p: ir.Plan) -> dict[int, str]:
    """The user's source lines of launches and calls, by step identity."""
    found, steps = dict[int, str](), p.flat
    for k, text in p.comments:
        line = text.partition(", ")[0]
        if ":" in line:
            found[id(steps[k])] = f" ({line})"
    return found


def _writes(
    p: ir.Plan, parts: Sequence[ir.Region], roots: Mapping[str, str]
) -> dict[str, TensorType]:
    """Buffers that graphs write into the caller's memory, with their types.

    For memory allocated by the plan, it is the first buffer of a result's memory. Memory allocated
    by a library, or a view of it, is copied with its own type.
    """
    inside = [s for x in parts for s in x.steps]
    made = {s.name: s.type for s in inside if isinstance(s, ir.Alloc)}
    own = {n for s in inside for n in ir.defined(s)}
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
        raise Uncaptured("two results are views of a library's result")
    return found


def _chain(
    x: ir.Region, used: Collection[str], roots: Mapping[str, str], writes: Collection[str]
) -> list[ir.Reuse | ir.ViewStep]:
    """The views that the outer plan repeats, since their memory is not the graph's."""
    own = {n for s in x.steps for n in ir.defined(s)}
    wanted, found = {*used}, list[ir.Reuse | ir.ViewStep]()
    for s in reversed(x.steps):
        if isinstance(s, ir.Alias) and s.name in wanted and s.name not in writes:
            root = roots[s.name]
            if root in writes or root not in own:
                found.append(s)
                wanted.add(s.source)
    return found[::-1]


def _replay(
    name: str, x: ir.Region, used: Collection[str], roots: Mapping[str, str],
    writes: Collection[str], chain: Collection[str],
) -> Replay:  # fmt: skip
    """A graph; its `reads` are all its external operands."""
    own = dict.fromkeys(n for s in x.steps for n in ir.defined(s))
    taken = tuple(dict.fromkeys(n for s in x.steps for n in ir.used(s) if n not in own))
    fresh = tuple(n for n in own if n in writes)
    outer = {*chain, *writes}  # the outer plan has these
    kept = tuple(n for n in own if n in used and n not in outer and roots.get(n, n) not in writes)
    return Replay(name, x.steps, taken, fresh, kept, (), (), frozenset(), frozenset())


def _settled(
    p: ir.Plan, moved: Collection[str], replays: Sequence[Replay], roots: Mapping[str, str]
) -> list[Replay]:
    """The graphs with operands sorted by kind, and the copies."""
    pinned = {n for n, i in p.tensors.items() if i.pinned and n not in moved}
    # Buffers kept by one graph for another are copied back as well.
    last = {n for n, i in p.tensors.items() if not i.written}
    fixed = {c.name for c in p.constants} | {n for r in replays for n in r.kept}
    found = []
    for r in replays:
        made = {s.name for s in r.steps if isinstance(s, ir.Alloc) and not s.zero}
        reads = tuple(n for n in r.reads if n not in fixed and n not in pinned)
        # A library may keep the addresses of its arguments.
        calls = [s for s in r.steps if isinstance(s, ir.CallStep)]
        touched = {roots.get(n, n) for s in calls for n in names_in(s)}
        moving = [roots.get(n, n) for n in (*reads, *r.writes)]
        copied = frozenset(n for n in (*reads, *r.writes) if roots.get(n, n) in touched)
        copied |= {n for n in r.writes if n not in made}
        if any(moving.count(roots.get(n, n)) > 1 for n in copied):
            raise Uncaptured("an operand copied into a graph has two names")
        back = frozenset(n for n in copied if n in reads and n not in last)
        given = [p.tensors[n].type.layout for n in sorted(back) if n in p.tensors]
        if any(x.numel is not x.storage for x in given):  # another argument may be in the gaps
            raise Uncaptured("an argument that is copied into a graph and back has gaps")
        pins = tuple(n for n in r.reads if n in pinned)
        rest = tuple(n for n in r.reads if n in fixed)
        found.append(replace(r, reads=reads, pinned=pins, fixed=rest, copied=copied, mutated=back))
    return found
