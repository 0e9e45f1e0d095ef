"""Schedule -> Plan: allocation, reuse and freeing of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from lenz.context import Context
from lenz.debug.blame import blaming
from lenz.ir import graph
from lenz.ir import plan as ir
from lenz.ir.alive import aliased
from lenz.ir.expr import nodes_of
from lenz.ir.graph import Extern, View, reads_of
from lenz.ir.kernel import Launch, Param, Schedule, exprs_of, programs
from lenz.ir.tensor import Buffer, TensorType, contiguous
from lenz.machines import capabilities_of, runs_programs
from lenz.plan.forms import formed
from lenz.plan.memory import FreeList, free_holds, may_overwrite, size_key
from lenz.plan.regions import regioned
from lenz.records import dataclass, field, replace
from lenz.sym import Int, Sym, Var, as_multiple, substitute
from lenz.target import HOST
from lenz.traits import has

LARGE = 1 << 20  # bytes of an argument for which the 1 us to check its owners pays
HUGE = 1 << 22  # bytes of new CPU memory that get huge pages: two of them
# Namespaces whose ops return as many results as their fake kernels.
TRUSTED = ("aten.", "prims.", "py.", "lenz.", "higher_order.")
# Namespaces without schemas: effects on arguments are unknown.
UNTOLD = ("py.", "lenz.", "higher_order.", "obj:")


@dataclass(frozen=True, slots=True)
class CallerFacts:
    """What the caller says about arguments and results of a graph.

    names    the user's names, by the graph's
    donated  arguments that a call may overwrite if nothing else holds them
    saved    the arguments were saved by a forward half; hooks may have replaced them
    pinned   arguments that keep their addresses
    written  arguments that the graph writes into
    graphs   CUDA graphs are wanted
    results  the types of the results, if CUDA graphs are wanted
    kept     the positions of results that only the backward half reads
    """

    names: Mapping[str, str] = field(default_factory=dict)
    donated: frozenset[str] = frozenset()
    saved: bool = False
    pinned: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    graphs: bool = False
    results: Sequence[TensorType | None] = ()
    kept: Sequence[int] = ()

    def input(self, b: Buffer, launched: bool) -> ir.Input:
        """An argument, with the checks at each call. That of the negative bit takes 35 ns.

        The bit is not checked for tensors of modules and saved tensors, which were checked before.
        The device is only checked for arguments of kernels: attention keeps its generator state on
        the CPU, whatever the fake tensor says.
        """
        user = self.names.get(b.name, b.name)
        is_new = "." not in user and (b.name.startswith("tangents") or not self.saved)
        signed = is_new and b.type.dtype.kind in ("float", "complex")
        called = user if user != b.name else ""
        stays = b.name in self.pinned, b.name in self.written
        return ir.Input(b.name, b.type, called, not launched, signed, self.saved, *stays)


USUAL = CallerFacts()


def build(s: Schedule, cx: Context, given: CallerFacts = USUAL) -> ir.Plan:
    """Lay out memory for a schedule."""
    p = formed(_Builder(s, cx, given).run())
    return regioned(p) if given.graphs else p


@dataclass(slots=True)
class _Builder:
    schedule: Schedule
    cx: Context
    given: CallerFacts
    steps: list[ir.Step | None] = field(default_factory=list)
    comments: list[tuple[int, str]] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)
    bases: Mapping[str, str] = field(default_factory=dict)
    pool: FreeList = field(default_factory=FreeList)
    # Buffers that kernels read, or whose memory views share (a view may be a call).
    addressed: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)  # results that are only valid after a wait
    lent: set[str] = field(default_factory=set)  # used by calls without a wait
    defined: dict[str, None] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    views: dict[str, list[str]] = field(default_factory=dict)
    known: dict[Var, None] = field(default_factory=dict)
    launched: set[str] = field(default_factory=set)
    aligned_at_launch: set[str] = field(default_factory=set)
    makers: dict[str, str] = field(default_factory=dict)  # buffer -> the op that returned it
    current: str = ""  # the GPU of the last launch
    scope: Mapping[str, Var] = field(default_factory=dict)  # kernels may also know upper bounds

    def run(self) -> ir.Plan:
        g = self.schedule.graph
        self.buffers, self.roots = graph.buffers_of(g), graph.roots_of(self.schedule.steps)
        self.bases = _bases(self.schedule)
        self.schedule = _without_dead_views(self.schedule, self.bases)
        for view, root in self.roots.items():
            self.views.setdefault(root, []).append(view)
        self.scope = g.env.scope()
        for x in self.schedule.steps:
            if isinstance(x, Launch):
                self.launched.update(x.args)
                names = [a for p, a in zip(x.kernel.params, x.args, strict=True) if p.aligned]
                self.aligned_at_launch.update((*names, *(self.roots.get(a, a) for a in names)))
        inputs = self.inputs(g)
        self.lifetimes(g)
        for k, step in enumerate(self.schedule.steps):
            with blaming(step):
                match step:
                    case Launch():
                        self.launch(k, step)
                    case Extern():
                        self.call(step)
                    case View():
                        name, root = step.out.name, self.roots[step.out.name]
                        kind = self.buffers[name].type
                        if (base := self.bases.get(name)) is not None:
                            root, first = base, self.buffers[base].type.layout.offset
                            place = replace(kind.layout, offset=kind.layout.offset - first)
                            kind = replace(kind, layout=place)
                        self.steps.append(ir.ViewStep(name, root, kind, detached=step.detached))
                        self.defined[name] = None
                self.release(k)
        constants = tuple(ir.Input(b.name, b.type) for b in g.constants)
        steps, comments = self.settled()
        given = (i.name for i in g.inputs if isinstance(i, Buffer))
        aligned = tuple(n for n in given if n in self.aligned_at_launch)
        known = {v.name for v in self.known}
        most = tuple((name, end) for name, end in g.env.most if name in known)
        kernels = ir.launched(steps)
        rest = comments, aligned, most, tuple(self.given.results), tuple(self.given.kept)
        return ir.Plan(g.name, inputs, constants, steps, g.outputs, kernels, g.objects, *rest)

    def settled(self) -> tuple[tuple[ir.Step, ...], tuple[tuple[int, str], ...]]:
        """The steps and comments; memory is reused where holding it does not raise the peak."""
        hint, given = self.schedule.graph.env.hint, self.given
        sizes = {n: hint(b.type.nbytes) for n, b in self.buffers.items() if n not in self.roots}
        inputs = {b.name for b in self.schedule.graph.inputs if isinstance(b, Buffer)}
        dying = inputs - given.pinned if given.saved else inputs & given.donated
        free = free_holds(self.steps, self.pool.holds, sizes, aliased(self.schedule), dying)
        for reuse, (freed, name) in self.pool.holds.items():
            if reuse in free:
                self.steps[freed] = None
            else:
                kind = self.buffers[name].type
                self.steps[reuse] = ir.Alloc(name, kind, huge=_is_huge(kind))
        moved = [*accumulate((step is not None for step in self.steps), initial=0)]
        steps = tuple(step for step in self.steps if step is not None)
        return steps, tuple((moved[k], text) for k, text in self.comments)

    def inputs(self, g: graph.Graph) -> tuple[ir.Input | ir.SizeInput, ...]:
        """Arguments, and sizes that only tensor arguments determine."""
        made: list[ir.Input | ir.SizeInput] = []
        multiples = [as_multiple(i) for i in g.inputs if isinstance(i, Sym)]
        self.known.update(dict.fromkeys(m[0] for m in multiples if m is not None))
        for i in g.inputs:
            if isinstance(i, Sym):
                made.append(ir.SizeInput(i))
                continue
            made.append(self.given.input(i, i.name in self.launched))
            self.defined[i.name] = None
            for stride, parts in ((False, i.type.shape), (True, i.type.layout.stride)):
                for dim, part in enumerate(parts):
                    scaled = as_multiple(part)
                    if scaled is not None and scaled[0] not in self.known:
                        self.known[scaled[0]] = None
                        self.steps.append(ir.BindSize(scaled[0], i.name, dim, stride, scaled[1]))
        self.defined.update(dict.fromkeys(b.name for b in g.constants))
        return tuple(made)

    def lifetimes(self, g: graph.Graph) -> None:
        """The last step that uses each memory; a view keeps its root alive."""
        self.lent = {self.roots.get(n, n) for n in graph.held_for_good(self.schedule.steps)}
        for k, step in enumerate(self.schedule.steps):
            for name in reads_of(step):
                if not isinstance(step, Extern) or step.op == "lenz.as_strided":
                    self.addressed |= {name, self.roots.get(name, name)}
                self.last[name] = k
                self.last[self.roots.get(name, name)] = k
            if isinstance(step, Extern) and step.waits:
                self.late.update(self.roots.get(r, r) for r in graph.atom_refs(step.args))
        for name in graph.atom_refs(g.outputs):
            self.pinned |= {name, self.roots.get(name, name)}
        self.pinned |= {b.name for b in g.constants}

    def launch(self, k: int, step: Launch) -> None:
        taken: dict[str, str] = {}
        plain = {v: self.scope.get(v.name, v) for v in step.kernel.sizes}
        for p, name in zip(step.kernel.params, step.args, strict=True):
            if p.mode == "work":
                device = self.buffers[step.args[0]].type.device
                kind = TensorType(p.dtype, device, contiguous((substitute(p.size, plain),)))
                self.buffers[name] = Buffer(name, kind)
                self.make(name, zero=True)
            if p.mode == "out" and name not in self.defined:
                dying = self.dying(k, step, p, taken)
                if dying is None:
                    self.allocate(self.buffers[name])
                    continue
                self.drop_views(dying)
                taken[dying] = name if dying in self.own else dying
                if dying in self.own:
                    self.reuse(name, dying)
                    del self.defined[dying]
                else:
                    self.make(name, over=dying)
        symbol, device = step.kernel.name, step.device
        if runs_programs(device) and device != self.current:
            self.steps.append(ir.Current(device))
            self.current = device
        self.comment(step)
        args = tuple(taken.get(a, a) for a in step.args)
        if not runs_programs(device):
            where = "" if device == HOST else device
            self.steps.append(ir.LaunchStep(symbol, args, step.kernel.sizes, device=where))
        else:
            grid = substitute(programs(step.kernel), plain)
            self.steps.append(ir.LaunchStep(symbol, args, tuple(plain.values()), grid, device))
            return  # on a GPU a failed check traps, as in eager
        if any(e.op.guarded for e in nodes_of(*exprs_of(step.kernel.body))):
            self.steps.append(ir.Check())

    def dying(self, k: int, step: Launch, out: Param, taken: Mapping[str, str]) -> str | None:
        """An argument that is last read by this launch and that the result may overwrite."""
        if not self.cx.options.reuse_buffers:
            return None
        name = step.args[step.kernel.params.index(out)]
        for p, other in zip(step.kernel.params, step.args, strict=True):
            if (
                p.mode == "in"
                and (other in self.own or (other in self.given.donated and self.is_large(p, out)))
                and other in self.defined
                and other not in self.pinned
                and other not in self.lent
                and other not in taken
                and self.last[other] == k
                and step.args.count(other) == 1
                and p.dtype.bytes == out.dtype.bytes
                and size_key(self.buffers[other].type) == size_key(self.buffers[name].type)
                and may_overwrite(step.kernel, p.name, out.name)
            ):
                return other
        return None

    def is_large(self, old: Param, new: Param) -> bool:
        """True if reusing the memory of the caller's argument pays."""
        size = self.schedule.graph.env.hint(old.size) * old.dtype.bytes
        return size >= LARGE and old.dtype is new.dtype

    def drop_views(self, source: str) -> None:
        """Free the views of memory about to be overwritten or freed."""
        for view in self.views.get(source, ()):
            if view in self.defined:
                self.steps.append(ir.Free(view))
                del self.defined[view]

    def comment(self, step: Launch | Extern) -> None:
        """Record the origin of the next step: the user's lines, then the nodes."""
        origins = step.origins if isinstance(step, Launch) else step.origin
        if origins:
            text = ", ".join(sorted(origins, key=lambda o: ":" not in o))
            self.comments.append((len(self.steps), text))

    def call(self, step: Extern) -> None:
        out = f"{step.op.rpartition('.')[0]}.out" if has(step.op, "into") else None
        only = step.outs[0] if len(step.outs) == 1 else None
        if out is not None and isinstance(only, Buffer) and only.type.dtype.is_float:
            self.allocate(only)
            kwargs = (*step.kwargs, ("out", graph.Ref(only.name)))
            self.comment(step)
            self.steps.append(ir.CallStep(out, step.args, kwargs, (only.name,), True, into=True))
            return
        # Shared memory is dropped after its last use here, and never reused.
        shared = {*step.mutates, *(source for _, source in step.aliases)}
        shared |= self.lent.intersection(self.roots.get(n, n) for n in graph.held_by(step))
        self.own -= {n for m in shared for n in (m, self.roots.get(m, m))}
        outs = tuple(o.name if isinstance(o, Buffer) else o for o in step.outs)
        self.known.update(dict.fromkeys(o for o in outs if isinstance(o, Var)))
        self.defined.update(dict.fromkeys(o for o in outs if isinstance(o, str)))
        self.comment(step)
        counted = not (step.single or step.op.startswith(TRUSTED)) and outs != (None,) * len(outs)
        writes = bool(step.mutates) or (step.op.startswith(UNTOLD) and any(reads_of(step)))
        told = False, step.holds, step.waits, counted, step.draws, writes
        self.steps.append(ir.CallStep(step.op, step.args, step.kwargs, outs, step.single, *told))
        # `getitem` extracts a result of a tuple; the maker is the op that returned the tuple.
        of = step.args[0] if step.op == "py.operator.getitem" else None
        maker = self.makers.get(of.name, step.op) if isinstance(of, graph.Ref) else step.op
        for o in step.outs:
            if isinstance(o, Buffer):
                self.makers[o.name] = maker
                self.bind_new_sizes(o)
                if o.name in self.addressed and o.name not in self.late:
                    is_aligned = o.name in self.aligned_at_launch
                    self.steps.append(ir.Lay(o.name, o.type, maker, is_aligned))

    def bind_new_sizes(self, out: Buffer) -> None:
        """Read data-dependent sizes (of nonzero, say) from the result."""
        for dim, part in enumerate(out.shape):
            if isinstance(part, Var) and part not in self.known:
                self.known[part] = None
                self.steps.append(ir.BindSize(part, out.name, dim))

    def allocate(self, b: Buffer) -> None:
        """Reuse dead memory of the same size, or allocate."""
        source = self.pool.take(b, len(self.steps)) if self.cx.options.reuse_buffers else None
        if source is None:
            self.make(b.name)
        else:
            self.reuse(b.name, source)

    def make(self, name: str, zero: bool = False, over: str = "") -> None:
        """New memory, or that of argument `over` if nothing else holds it."""
        kind = self.buffers[name].type
        self.steps.append(ir.Alloc(name, kind, zero=zero, huge=_is_huge(kind), over=over))
        self.own.add(name)
        self.defined[name] = None

    def reuse(self, name: str, source: str) -> None:
        """The memory of `source` under a new name."""
        self.steps.append(ir.Reuse(name, source, self.buffers[name].type))
        self.own.add(name)
        self.defined[name] = None

    def release(self, k: int) -> None:
        """Free, or keep for reuse, all memory whose last use was step k."""
        step = self.schedule.steps[k]
        for name in dict.fromkeys(self.roots.get(n, n) for n in (*reads_of(step), *_defined(step))):
            if self.last.get(name, k) > k or name in self.pinned or name not in self.defined:
                continue
            self.drop_views(name)
            del self.defined[name]
            # Memory of arguments and calls is only released; our own may be reused.
            if name in self.own:
                self.pool.give(self.buffers[name], len(self.steps))
            self.steps.append(ir.Free(name))


def _is_huge(t: TensorType) -> bool:
    """True for memory in which page faults may dominate: large, or of unknown size."""
    size = t.nbytes
    return capabilities_of(t.device).paged and (not isinstance(size, Int) or size.value >= HUGE)


def _bases(s: Schedule) -> dict[str, str]:
    """Each view of a detached view -> that view, which is its base for autograd."""
    found: dict[str, str] = {}
    cut = {n.out.name for n in s.steps if isinstance(n, View) and n.detached}
    for n in s.steps:
        if isinstance(n, View) and (n.source in cut or n.source in found):
            found[n.out.name] = n.source if n.source in cut else found[n.source]
    return found


def _without_dead_views(s: Schedule, bases: Mapping[str, str]) -> Schedule:
    """The schedule without views that no call, launch or result uses.

    Kernels address the memory of a view, so most views of a graph are not needed.
    """
    used = {n for step in s.steps if not isinstance(step, View) for n in reads_of(step)}
    used |= {*graph.atom_refs(s.graph.outputs)}
    for n in sorted(used):
        while (n := bases.get(n, "")) and n not in used:
            used.add(n)
    steps = tuple(x for x in s.steps if not isinstance(x, View) or x.out.name in used)
    return replace(s, steps=steps)


def _defined(step: Launch | Extern | View) -> tuple[str, ...]:
    if isinstance(step, Launch):
        pairs = zip(step.kernel.params, step.args, strict=True)
        return tuple(a for p, a in pairs if p.mode == "out")
    return tuple(b.name for b in graph.outs_of(step))
