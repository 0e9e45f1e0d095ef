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

from lenz.ir.plan import Alloc, BindSize, Input, Plan
from lenz.loading import Boxed, fast_call, op_of
from lenz.machine.cuda.graph import Pool, Record, Wanted, capture, pool
from lenz.machines import Functions
from lenz.plan.graphs import GRAPH, Graphed, Uncaptured, graphed
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
    record: Record


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
    store: Store | None = None


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
        copied = len(self.graphed.copied)
        return f"all of it, with {copied} tensors copied" if copied else "all of it"

    def split(self) -> Graphed | None:
        """The graph and the plan around it; None, and the reason in `why`, if there is none."""
        g = self.given
        try:
            return graphed(g.plan, op_of, g.pinned - self.moving, g.results, g.saved)
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
        with self.lock:
            try:
                key = self.key(args)
            except (AttributeError, TypeError, ValueError):  # not what the plan takes: it says so
                return self.plain(args)
            self.misses += 1
            for made in self.made.get(key, ()):
                results = made.tried(args)
                if results is not None:
                    self.choose(key, made)
                    return results
            return self.without(key, args)

    def without(self, key: Key, args: list[Any]) -> Sequence[Any]:
        """Run a call that no graph fits, by a new one if such calls come again."""
        if self.moves(key):
            return self.plain(args)
        if len(self.seen) > 64 * MOST:
            self.seen.clear()
        self.seen[key] += 1
        if self.seen[key] <= WARM:
            return self.plain(args)
        if self.is_measured and self.seen[key] == WARM + 1:
            self.took[key], given = _timed(self.plain, args)
            return list(given)
        made = self.make(key, args) if self.has_room(key) else None
        if made is None:
            return self.plain(args)
        took, results = _timed(made.tried, args) if key in self.took else (0.0, made.tried(args))
        plain = self.took.pop(key, took)
        if took > SLOWER * plain:
            self.stop(f"a replay takes {1e3 * took:.2f} ms, launches {1e3 * plain:.2f} ms")
        return self.plain(args) if results is None else results

    def choose(self, key: Key, made: Made) -> None:
        """Have the next call try this graph first."""
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
        replays = sum(m.record.replays for twins in self.made.values() for m in twins)
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

    def make(self, key: Key, args: list[Any]) -> Made | None:
        """A graph for calls like this one; None, and the reason in `why`, if there is none."""
        assert self.graphed is not None
        try:
            with torch.cuda.device(self.graphed.device), torch.no_grad():
                made = self.captured(self.graphed, key, args)
        except (RuntimeError, torch.AcceleratorError) as e:
            self.stop(f"capturing it failed: {e}".splitlines()[0])
            return None
        if made is None:
            self.stop("native code does not run it")
            return None
        self.made.setdefault(key, []).append(made)
        self.choose(key, made)
        return made

    def captured(self, g: Graphed, key: Key, args: Sequence[Any]) -> Made | None:
        """The graph for these arguments, and the code that replays it."""
        p, given = self.given.plan, self.given
        sizes = sizes_of(p, args)
        tensors = {i.name: a for i, a in zip(p.inputs, args, strict=True) if isinstance(i, Input)}
        names = list(tensors)
        seeds = {n: torch.zeros(2, dtype=torch.int64, device=g.device) for n in g.reads}
        reads = {n: tensors.get(n, seeds[n]) for n in g.reads}
        writes = {n: _empty(t, sizes) for n, t in g.writes.items()}
        fixed = {**given.constants, **{n: tensors[n] for n in g.pinned}}
        read = partial(_value, {})
        how = g.kept, g.copied, given.mutated, sizes, read
        wanted = Wanted(g.inner, reads, writes, fixed, *how)
        gpu, own = torch.device(g.device).index, {s.name for s in g.inner if isinstance(s, Alloc)}
        memory = pool(gpu, key[0][0]) if own >= {*g.kept} else Pool()
        c = capture(wanted, given.functions, gpu, memory)
        pairs = [(names.index(n), start) for n, start in zip(g.pinned, key[1], strict=True)]
        record = Record(c, key[0][0], [*g.reads, *g.writes], pairs)
        module = {"OBJECTS": {}, **given.constants, **c.kept, GRAPH: record}
        ways: tuple[Boxed, Any] = self.decide, lambda args: None
        made = [fast_call(g.plan, {GRAPH: record}, module, w, given.store) for w in ways]
        if made[0] is None or made[1] is None:
            return None
        record.expect([sizes[v] for v in made[0].sizes if v in sizes])
        return Made(made[0].call, made[1].call, record)


def _timed(run: Callable[[list[Any]], Any], args: list[Any]) -> tuple[float, Any]:
    """The seconds of a call and its results."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    results = run(args)
    torch.cuda.synchronize()
    return time.perf_counter() - start, results


def _value(own: Mapping[str, Any], a: Any, look: Callable[[Any], Any]) -> Any:
    return value(a, own, look)


def _empty(t: Any, sizes: Mapping[Var, int]) -> torch.Tensor:
    shape, stride = ([evaluate(x, sizes) for x in y] for y in (t.shape, t.layout.stride))
    return torch.empty_strided(shape, stride, dtype=t.dtype.torch, device=t.device)


def sizes_of(p: Plan, args: Sequence[Any]) -> dict[Var, int]:
    """The sizes that the arguments of a call give."""
    places, found = {}, dict[Var, int]()
    for i, a in zip(p.inputs, args, strict=True):
        if isinstance(i, Input):
            places[i.name] = a
        elif not isinstance(i.value, Int) and (whole := as_multiple(i.value)):
            found.setdefault(whole[0], a // whole[1])
    for s in p.steps:
        if isinstance(s, BindSize) and s.source in places and s.var not in found:
            t = places[s.source]
            found[s.var] = (t.stride(s.dim) if s.stride else t.size(s.dim)) // s.factor
    return found
