"""Independent kernels side by side in one launch, on machines that run programs.

    launch @add(%x, %y)        kernel @combo_0 combo (..) {
    launch @mul(%u, %v)   ==>    for i in 8 : grid { add }  for j in 3 : grid { mul }
                               }

The first programs run the first kernel, and so on. A launch takes 4 to 6 us of the host, and small
kernels, such as those of an optimizer, run for less.

A launch waits until the first step that needs it, or that writes what it reads. Until then others
may join it. A short kernel that must follow it waits too, one level higher: an optimizer counts the
steps of each parameter, after its update has read the count.

So that no memory lives longer for it, only kernels with little new memory wait. A kernel may have
more if all of it is returned, and it reads less than that, or arguments alone that are larger:
conversions of gradients and of weights under autocast. Others wait for them only if they read and
write little, or only write arguments: what a backward pass reads of its arguments is freed after
the last reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from lenz.context import Context
from lenz.errors import UserError
from lenz.ir import kernel as ir
from lenz.ir.graph import Extern, View, note_memory, outs_of, reads_of, returned_by, spread_over
from lenz.ir.printer import show_expr
from lenz.ir.tensor import Buffer, axis
from lenz.machines import runs_programs
from lenz.options import Pass, named_function
from lenz.records import dataclass, field
from lenz.schedule.order import RETURNED
from lenz.sym import ONE, SymEnv, Var

# Bytes of one kernel: all of its memory, and its new memory. Larger ones are not short, unless they
# only update arguments by arguments, which live on anyway.
LARGEST, NEWEST, UPDATE = 16 << 20, 1 << 20, 1 << 30
# Forms of the kernels of one launch, which compile one after the other, and its pointers and sizes:
# CUDA passes 4 KB of arguments.
DIFFERENT, ARGUMENTS = 8, 400
# Programs of up to so many warps that all run at once; more of them need their own number of warps.
AT_ONCE, WARPS = 1024, 8
LEVELS = 4  # launches that wait for each other
KINDS = ("pointwise", "reduction", "outer_reduction", "transpose")
Step = ir.Launch | Extern | View


@dataclass(slots=True)
class _Waiting:
    """Launches that may be one, and the memory that they read and write.

    `changes` says whether they write an argument of the graph; `held` are the bytes of those that
    write something else.
    """

    launches: list[ir.Launch] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    changes: bool = False
    held: int = 0

    def blocks(self, reads: set[str], writes: set[str]) -> bool:
        """Whether a step cannot run before these launches."""
        return not (self.writes.isdisjoint(reads | writes) and self.reads.isdisjoint(writes))


def share_launches(s: ir.Schedule, cx: Context) -> ir.Schedule:
    """The schedule with independent launches of short kernels joined, `side_by_side` at most."""
    most, found = cx.options.side_by_side, list[Step]()
    if most < 2 or not any(isinstance(x, ir.Launch) and runs_programs(x.device) for x in s.steps):
        return s
    # By what the kernels have in common, and by level.
    waiting, memory = dict[tuple[object, int], _Waiting](), dict[str, tuple[str, ...]]()
    given = {b.name for b in s.graph.inputs if isinstance(b, Buffer)}
    returned = returned_by(s.graph)
    names: dict[ir.Kernel, str] = {}

    def start(which: tuple[object, int]) -> None:
        """Launch these kernels, after those that they need; unless they have run already."""
        w = waiting.pop(which, _Waiting())
        for lower, x in [*waiting.items()]:
            if lower[1] < which[1] and x.blocks(w.reads, w.writes):
                start(lower)
        groups = _divided(w.launches, cx.options.launch_groups)
        for part in chain.from_iterable(_parts(g, most) for g in groups):
            joins = part[1:] and cx.allow("side by side", part[0].kernel.name)
            found.extend([_joined(part, names)] if joins else part)

    for step in s.steps:
        reads, writes = _touched(step, memory)
        # A call may raise, and eager has changed the arguments by then.
        calls, short = isinstance(step, Extern), _is_short(step, given, returned, s.graph.env)
        before = [x for x, w in waiting.items() if w.blocks(reads, writes) or (calls and w.changes)]
        level = max([n + 1 for _, n in before], default=0)
        if not short or level == LEVELS or sum(waiting[x].held for x in before) > NEWEST:
            level = 0
            for which in before:
                start(which)
        if isinstance(step, ir.Launch) and short:
            w = waiting.setdefault((_alike(step, s.graph.env), level), _Waiting())
            w.launches.append(step)
            w.reads |= reads
            w.writes |= writes
            w.changes |= not given.isdisjoint(writes)
            if not writes <= given:
                w.held += sum(_bytes(step.kernel.params, s.graph.env))
        else:
            found.append(step)
    for which in [*waiting]:
        start(which)
    return replace(s, steps=tuple(found))


def _touched(step: Step, memory: dict[str, tuple[str, ...]]) -> tuple[set[str], set[str]]:
    """The memory that a step reads, and that it writes or defines; `memory` learns of aliases."""
    match step:
        case ir.Launch(k, args):
            pairs = [*zip(args, [p.mode for p in k.params], strict=True)]
            reads, writes = [a for a, m in pairs if m == "in"], [a for a, m in pairs if m != "in"]
        case View(_, source):
            note_memory(step, memory)
            reads, writes = [source], []
        case Extern():
            note_memory(step, memory)
            reads = [*reads_of(step), *step.waits]
            writes = [*step.mutates, *(b.name for b in outs_of(step))]
            # An op from outside torch may write what it reads, whatever its schema says.
            writes += [] if step.op.startswith("aten.") else reads
    return {*spread_over(reads, memory)}, {*spread_over(writes, memory)}


def _is_short(x: Step, given: set[str], returned: set[str], env: SymEnv) -> bool:
    """Whether a step is a launch that may wait for others.

    `given` are the graph's arguments, `returned` its results.
    """
    if not isinstance(x, ir.Launch) or not runs_programs(x.device) or x.kernel.kind not in KINDS:
        return False
    params, most = x.kernel.params, UPDATE if given.issuperset(x.args) else LARGEST
    new = sum(_bytes([p for p in params if p.mode == "out"], env))
    old = sum(_bytes([p for p in params if p.mode != "out"], env))
    outs = {a for a, p in zip(x.args, params, strict=True) if p.mode == "out"}
    waits = outs <= returned and (old < new or (old > new and given.issuperset({*x.args} - outs)))
    return old + new <= most and new <= (RETURNED if waits else NEWEST)


def _bytes(params: Sequence[ir.Param], env: SymEnv) -> list[int]:
    return [p.dtype.bytes * env.hint(p.size) for p in params]


def _alike(x: ir.Launch, env: SymEnv) -> object:
    """What kernels of one launch have in common."""
    t = x.kernel.tile
    if env.hint(ir.programs(x.kernel)) <= AT_ONCE:
        t = replace(t, warps=max(t.warps, WARPS), registers=0)
    return x.device, t


def _parts(waiting: Sequence[ir.Launch], most: int) -> Iterator[list[ir.Launch]]:
    """Launches for one launch each. Those that may have one body come together."""
    same, part = dict[object, list[ir.Launch]](), list[ir.Launch]()
    forms = {x.kernel.name: _form(x.kernel) for x in waiting}
    for x in waiting:
        same.setdefault(forms[x.kernel.name], []).append(x)
    for x in chain.from_iterable(same.values()):
        wider = [*part, x]
        given = sum(len(y.args) + len(y.kernel.sizes) for y in wider)
        many = len(wider) > most or len({forms[y.kernel.name] for y in wider}) > DIFFERENT
        if part and (many or given > ARGUMENTS):
            yield part
            wider = [x]
        part = wider
    if part:
        yield part


def _divided(waiting: Sequence[ir.Launch], passes: Sequence[Pass]) -> Sequence[Sequence[ir.Launch]]:
    """The groups that the user's functions make of launches, none of which needs another."""
    groups: Sequence[Sequence[ir.Launch]] = [waiting]
    for name, given in passes if len(waiting) > 1 else ():
        run = named_function("launch_groups", name)
        groups = [part for group in groups for part in run(group, **dict(given))]
        if sorted(map(id, chain.from_iterable(groups))) != sorted(map(id, waiting)):
            raise UserError(f"option launch_groups: {name} does not give each launch once")
    return groups


def _form(k: ir.Kernel) -> object:
    """What kernels of one body have in common: all but their pointers, and where lanes end."""
    loops = [
        (s.kind, s.axis.width, len(s.axis.ends)) for s in ir.walk(k.body) if isinstance(s, ir.For)
    ]
    return (*[(p.dtype, p.aligned) for p in k.params], *loops, *map(show_expr, ir.exprs_of(k.body)))


def _joined(parts: Sequence[ir.Launch], names: dict[ir.Kernel, str]) -> ir.Launch:
    """One launch of all kernels; equal ones get one name."""
    params: dict[tuple[str, ir.Param], ir.Param] = {}
    scratch, body = list[ir.Local](), list[ir.Stmt]()
    sizes: dict[str, Var] = {}
    for x in parts:
        new: dict[str, str] = {}
        for p, a in zip(x.kernel.params, x.args, strict=True):
            own = params.setdefault((a, replace(p, name="")), replace(p, name=f"a{len(params)}"))
            new[p.name] = own.name
        for local in x.kernel.locals:
            new[local.name] = f"l{len(scratch)}"
            scratch.append(replace(local, name=new[local.name]))
        loops = ir.renamed(x.kernel.body, new)
        body += loops if ir.around(loops, "grid")[0] else [ir.For(axis("one", ONE), "grid", loops)]
        sizes |= {v.name: v for v in x.kernel.sizes}
    tiles = dict.fromkeys(x.kernel.tile for x in parts)
    tile = max(tiles, key=lambda t: t.warps)
    tile = replace(tile, registers=0) if len(tiles) > 1 else tile
    told = tuple([sizes[n] for n in sorted(sizes)])
    k = ir.Kernel("", "combo", (*params.values(),), told, tuple(body), tuple(scratch), tile)
    name = names.setdefault(k, f"combo_{len(names)}")
    origins = tuple(dict.fromkeys(o for x in parts for o in x.origins))
    args = tuple([a for a, _ in params])
    return ir.Launch(replace(k, name=name), args, (), origins, parts[0].device)
