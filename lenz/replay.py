"""Calls of a plan that CUDA graphs replay: which graph, when one is made, and when none is used.

A graph is made for the sizes of a call in one stream. The first call with these sizes runs without
one, so that sizes that come once cost nothing; the second one makes it. A call that its graph does
not fit runs without one: the memory that the graph keeps for the backward half is still in use, an
argument has moved, or the user captures a graph of their own.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from lenz.ir.plan import BindSize, Input, Keep, LaunchStep, Plan, Reuse, Step, ViewStep
from lenz.loading import Boxed, fast_call, op_of
from lenz.machine.cuda.graph import (
    Captured,
    Pool,
    Record,
    Runner,
    Wanted,
    capture,
    keeps_its_own,
    pool,
    start,
)  # fmt: skip
from lenz.machines import Functions
from lenz.plan.graphs import Graphed, Region, Terms, Uncaptured, graphed
from lenz.plan.native_objects import value
from lenz.runtime import executor
from lenz.runtime.store import Store
from lenz.sym import Int, Var, as_multiple, evaluate

WARM = 1  # calls without a graph before one is made for their sizes; one more to measure it
SLOWER = 1.02  # a graph that takes so much longer than launches is not used
MOST = 8  # sets of sizes and addresses of a plan that have graphs
TWINS = 2  # graphs for one such set, where the memory that one keeps is in use
REST = 64  # calls that no graph fits, until one that is not used makes room for others
MOVES = 8  # calls in a row, each with new addresses, after which these are expected anywhere

Sizes: TypeAlias = tuple[int, ...]
Key: TypeAlias = tuple[Sizes, tuple[int, ...]]


@dataclass(slots=True)
class Made:
    """One graph.

    call   replays it, or has the plan decide about a call that it does not fit
    tried  the same, but None for such a call
    """

    call: Boxed
    tried: Callable[[list[Any]], Sequence[Any] | None]
    records: tuple[Record, ...]

    @property
    def replays(self) -> int:
        """How often it was replayed."""
        return self.records[0].replays


@dataclass(slots=True)
class Given:
    """What a plan is made of, and what of it graphs may rely on.

    pinned  arguments that keep their addresses: parameters, and what a forward half has kept
    mutated arguments that the plan writes into
    results, saved  the types of results, and which of them only the backward half reads
    """

    plan: Plan
    functions: Functions
    constants: Mapping[str, torch.Tensor]
    pinned: frozenset[str]
    mutated: frozenset[str]
    results: Sequence[Any]
    saved: Sequence[int]
    objects: Mapping[str, Any]
    store: Store | None = None

    @property
    def places(self) -> dict[str, str]:
        """The plan's objects by the names that code finds them by."""
        return {f"obj_{k}": name for k, name in enumerate(self.plan.objects)}


class Replayed:
    """A plan as a callable that takes a list of arguments and empties it.

    `why` says why no graph is made; it is empty while graphs may be made.
    """

    def __init__(self, given: Given, plain: Boxed, is_measured: bool) -> None:
        self.given, self.plain, self.is_measured = given, plain, is_measured
        self.made: OrderedDict[Key, list[Made]] = OrderedDict()
        self.used: dict[Key, int] = {}  # the miss at which its graph was chosen last
        self.seen: Counter[Key] = Counter()
        self.took: dict[Key, float] = {}
        self.misses = self.replays = 0
        self.moving: set[str] = set()
        self.addresses: dict[Sizes, list[tuple[int, ...]]] = {}
        self.lock = threading.RLock()
        self.why = ""
        self.now: Boxed = self.decide
        self.graphed = self.split()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run a call: by the graph of the last one, if that fits."""
        return self.now(args)

    @property
    def told(self) -> str:
        """Whether a graph replays the plan, or why not, for the report."""
        if self.graphed is None:
            return f"none, since {self.why}" if self.why else "none"
        count, outside = len(self.graphed.regions), "; ".join(self.graphed.outside)
        return f"{count}, around what none can hold: {outside}" if outside else "all of it"

    def split(self) -> Graphed | None:
        """The graph and the plan around it; None, and the reason in `why`, if there is none."""
        g = self.given
        try:
            terms = Terms(op_of, g.pinned - self.moving, g.mutated, g.results, g.saved)
            return graphed(g.plan, terms)
        except Uncaptured as e:
            self.stop(str(e))
            return None

    def stop(self, why: str) -> None:
        """Make no graph any more."""
        self.why, self.now, self.graphed = why, self.plain, None
        self.made.clear()

    def decide(self, args: list[Any]) -> Sequence[Any]:
        """Run a call that the graph of the last one does not fit."""
        if self.graphed is None or executor.modes() or torch.cuda.is_current_stream_capturing():
            return self.plain(args)
        try:
            key = self.key(args)
        except (AssertionError, AttributeError, TypeError, ValueError):
            return self.plain(args)  # not what the plan takes: it says so, or runs a fallback
        with self.lock:
            self.misses += 1
            known = tuple(self.made.get(key, ()))
        for made in known:
            is_timed = key in self.took
            took, results = _timed(made.tried, args) if is_timed else (0.0, made.tried(args))
            if results is not None:
                self.choose(key, made)
                self.compare(key, took)
                return results
        return self.without(key, args)

    def without(self, key: Key, args: list[Any]) -> Sequence[Any]:
        """Run a call that no graph fits, by a new one if such calls come again."""
        with self.lock:  # others may run calls meanwhile
            if self.graphed is None or self.moves(key):
                return self.plain(args)
            if len(self.seen) > 64 * MOST:
                self.seen.clear()
            self.seen[key] += 1
            is_timed = self.is_measured and self.seen[key] == WARM + 1
            makes = self.seen[key] > WARM + is_timed and self.has_room(key)
            if makes and takes(self.given.plan, args):
                return self.make(key, args)
        if not is_timed:
            return self.plain(args)
        self.took[key], given = _timed(self.plain, args)
        return list(given)

    def compare(self, key: Key, took: float) -> None:
        """Make no graphs any more if launches have taken less time than a replay."""
        plain = self.took.pop(key, took)
        if took > SLOWER * plain:
            self.stop(f"a replay takes {1e3 * took:.2f} ms, launches {1e3 * plain:.2f} ms")

    def choose(self, key: Key, made: Made) -> None:
        """Have the next call try this graph first."""
        with self.lock:
            if key in self.made:
                self.now, self.used[key] = made.call, self.misses
                self.made.move_to_end(key)

    def has_room(self, key: Key) -> bool:
        """Whether a graph may be made, perhaps in place of one that is not used."""
        if key in self.made:
            return len(self.made[key]) < TWINS
        if len(self.made) < MOST:
            return True
        oldest = next(iter(self.made))
        if self.misses - self.used[oldest] <= REST:
            return False
        del self.made[oldest], self.used[oldest]
        return True

    def moves(self, key: Key) -> bool:
        """Whether addresses have just been found to move: then other graphs are made."""
        sizes, starts = key
        replays = sum(m.replays for twins in self.made.values() for m in twins)
        if replays != self.replays:
            self.addresses.clear()
        self.replays = replays
        known = self.addresses.setdefault(sizes, [])
        if starts in known or key in self.made:
            return False
        known.append(starts)
        if len(known) <= MOVES or self.graphed is None:
            return False
        pairs = zip(self.graphed.pinned, known[-2], starts, strict=True)
        self.moving |= {name for name, a, b in pairs if a != b}
        self.made.clear()
        self.addresses.clear()
        self.now, self.graphed = self.decide, self.split()
        return True

    def key(self, args: Sequence[Any]) -> Key:
        """The sizes of a call with its stream, and the addresses of pinned arguments."""
        assert self.graphed is not None
        p = self.given.plan
        tensors = {i.name: a for i, a in zip(p.inputs, args, strict=True) if isinstance(i, Input)}
        sizes = executor.stream(self.gpu), *sizes_of(p, args).values()
        return sizes, tuple([tensors[n].data_ptr() for n in self.graphed.pinned])

    @property
    def gpu(self) -> int:
        """The number of the GPU."""
        assert self.graphed is not None
        return int(torch.device(self.graphed.device).index)

    def make(self, key: Key, args: list[Any]) -> Sequence[Any]:
        """Make graphs for calls like this one, and run this one."""
        assert self.graphed is not None
        g, given = self.graphed, self.given
        names = [i.name if isinstance(i, Input) else "" for i in given.plan.inputs]
        env = {**dict(zip(names, args, strict=True)), **given.constants}
        value: Any = partial(_value, given.objects)
        run = Recorded(self, env, sizes_of(given.plan, args), value, key[0][0])
        with torch.cuda.device(g.device), torch.no_grad():
            for s in g.plan.steps:
                run.step(s)
        made = None if run.why else self.linked(g, key, [n for n in names if n], run)
        if made is None:
            self.stop(run.why or "native code does not run it")
        else:
            self.made.setdefault(key, []).append(made)
            self.used[key] = self.misses
            if key not in self.took:  # else the next call is timed
                self.choose(key, made)
        results = [value(a, run.look) for a in g.plan.outputs]
        args.clear()
        return results

    def linked(self, g: Graphed, key: Key, names: list[str], run: Recorded) -> Made | None:
        """The code that replays the graphs of a run."""
        starts = dict(zip(g.pinned, key[1], strict=True))
        records = {
            r.name: Record(
                run.captured[r.name],
                key[0][0],
                [*r.reads, *r.writes],
                [(names.index(n), starts[n]) for n in r.pinned],
            )
            for r in g.regions
        }
        kept = {n: t for c in run.captured.values() for n, t in c.kept.items()}
        given = self.given
        own = {py: given.objects[o] for py, o in given.places.items()}
        module = {"OBJECTS": given.places, **own, **given.functions, **given.constants, **kept}
        functions = {**given.functions, **records}
        ways: tuple[Boxed, Any] = self.decide, lambda args: None
        found = [fast_call(g.plan, functions, module, w, given.store) for w in ways]
        if found[0] is None or found[1] is None:
            return None
        for record in records.values():
            record.expect([run.sizes[v] for v in found[0].sizes if v in run.known])
        return Made(found[0].call, found[1].call, tuple(records.values()))


class Recorded(Runner):
    """The run of a plan in which its graphs are captured; `known` are the sizes of arguments.

    If capturing fails, `why` says so, and the steps of this and of later graphs are run one by one.
    """

    def __init__(
        self, of: Replayed, env: Mapping[str, Any], sizes: Mapping[Var, int], value: Any,
        stream: int,
    ) -> None:  # fmt: skip
        super().__init__(of.given.functions, env, sizes, value, stream)
        assert of.graphed is not None
        self.gpu, self.known = of.gpu, frozenset(sizes)
        self.regions = {r.name: r for r in of.graphed.regions}
        self.captured: dict[str, Captured] = {}
        self.why = ""

    def step(self, s: Step) -> None:
        """Run one step."""
        if self.why and isinstance(s, Keep | Reuse | ViewStep) and s.name in self.env:
            return  # the steps of a graph have made it
        if isinstance(s, Keep):
            found = next(c.kept[s.name] for c in self.captured.values() if s.name in c.kept)
            self.name(s.name, torch.as_strided(found, found.shape, found.stride()).detach())
            return
        super().step(s)

    def launch(self, s: LaunchStep) -> list[int]:
        """Capture a graph and launch it, or launch a kernel."""
        if not s.graph:
            return super().launch(s)
        r = self.regions[s.kernel]
        try:
            if not self.why:
                self.captured[r.name] = self.capture(r)
                start(self.captured[r.name], self.stream)
                return []
        except (RuntimeError, torch.AcceleratorError) as e:
            self.why = f"capturing it failed: {e}".splitlines()[0]
        for name in r.writes:
            del self.env[name]  # memory that the steps allocate themselves
        for x in r.steps:
            self.step(x)
        return []

    def capture(self, r: Region) -> Captured:
        """Capture a graph."""
        others = {n: t for c in self.captured.values() for n, t in c.kept.items()}
        reads, writes, pins = ({n: self.env[n] for n in x} for x in (r.reads, r.writes, r.pinned))
        fixed = {**pins, **{n: others[n] if n in others else self.env[n] for n in r.fixed}}
        w = Wanted(r.steps, reads, writes, fixed, r.kept, r.copied, r.mutated)
        memory = Pool() if keeps_its_own(w) else pool(self.gpu, self.stream)
        return capture(w, self, self.gpu, memory)


def _timed(run: Callable[[list[Any]], Any], args: list[Any]) -> tuple[float, Any]:
    """The seconds of a call and its results."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    results = run(args)
    torch.cuda.synchronize()
    return time.perf_counter() - start, results


def _value(own: Mapping[str, Any], a: Any, look: Callable[[Any], Any]) -> Any:
    return value(a, own, look)


def takes(p: Plan, args: Sequence[Any]) -> bool:
    """Whether the plan takes these arguments as they are, without a copy or a fallback."""
    sizes = sizes_of(p, args)
    if any(v.name == name and size > most for v, size in sizes.items() for name, most in p.most):
        return False
    for i, a in zip(p.inputs, args, strict=True):
        if not isinstance(i, Input):
            if type(a) is not int:
                return False
            continue
        t = i.type
        shape, stride = (tuple([evaluate(x, sizes) for x in y]) for y in (t.shape, t.layout.stride))
        try:
            executor.check(a, shape, stride)
        except (AssertionError, TypeError):
            return False
        is_plain = type(a) in (torch.Tensor, torch.nn.Parameter) and not (a.is_neg() or a.is_conj())
        here = i.anywhere or a.device == torch.device(t.device)
        far = i.name in p.aligned and a.data_ptr() & 15
        if not is_plain or not here or far or a.dtype is not t.dtype.torch:
            return False
    return True


def sizes_of(p: Plan, args: Sequence[Any]) -> dict[Var, int]:
    """The sizes that the arguments of a call give."""
    places, found = {}, dict[Var, int]()
    for i, a in zip(p.inputs, args, strict=True):
        if isinstance(i, Input):
            places[i.name] = a
        elif not isinstance(i.value, Int) and (whole := as_multiple(i.value)):
            found.setdefault(whole[0], _divided(a, whole[1]))
    for s in p.steps:
        if isinstance(s, BindSize) and s.source in places and s.var not in found:
            t = places[s.source]
            found[s.var] = _divided(t.stride(s.dim) if s.stride else t.size(s.dim), s.factor)
    return found


def _divided(whole: int, by: int) -> int:
    if whole % by:
        raise ValueError(f"{whole} is no multiple of {by}")
    return whole // by
