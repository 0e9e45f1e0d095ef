"""Replays of a plan as CUDA graphs: when a graph is made, and which one runs a call.

A graph is made for one set of sizes in one stream. The first call with these sizes runs without a
graph, so that one-off sizes cost nothing; the second call captures it, in the same thread: no
capture survives its first, in which libraries make their handles. Some calls run without their
graph: the memory that it keeps for the backward half is still in use, an argument has moved, or the
user captures a graph of their own. The report counts all of these.

With `auto`, launches and replays alternate until each was timed three times, or two decide.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from lenz.ir import plan as ir
from lenz.loading import fast_call
from lenz.machines import Functions, loader_of
from lenz.options import Options
from lenz.plan.graphs import Graphed, Replay, Uncaptured, graphed
from lenz.plan.native_objects import value
from lenz.plan.regions import regioned
from lenz.records import dataclass
from lenz.runtime import executor
from lenz.runtime.captured import Captured, CaptureError, Record, Runner, Wanted
from lenz.runtime.store import Store
from lenz.sym import Int, Var, as_multiple, evaluate
from lenz.trial import Trial

WARM = 1  # calls without a graph before one is made for their sizes; one more to measure
TWINS = 2  # graphs for one set of sizes, when the memory of the first is in use
# Misses after which an unused graph makes room for others; twice as many each time that one had
# fewer replays: a capture takes 4 ms, as long as 60 replays of a layer save. 2,800 calls of 20
# sizes at random make 9 graphs; 37 where one replay was enough.
REST = 64
# Captures that fail before the op at fault is left outside of graphs, or none is tried again:
# another thread may have broken the first.
FAILURES = 3
MOVES = 8  # calls in a row with new addresses, after which arguments count as moving

# How a call was run, in the words of the report.
WARM_UP, RECORD, REPLAY, TIMED = "warm-up", "record", "replay", "by launches to time them"
ALIVE = "without a graph because the last forward is alive"
BUSY = "without a graph because another call is under way"
CAPTURED = "into a graph that the user captures"
FULL = "without a graph because other sizes have them"
UNFIT = "without a graph because an argument is not as the plan takes it"
MOVED = "without a graph because arguments move"

Sizes: TypeAlias = tuple[int, ...]
Key: TypeAlias = tuple[Sizes, tuple[int, ...]]


@dataclass(slots=True)
class GraphCall:
    """One graph.

    call   replays it, or lets the plan decide about a call that does not fit
    tried  the same, but returns None for such a call
    """

    call: ir.Boxed
    tried: Callable[[list[Any]], Sequence[Any] | None]
    records: tuple[Record, ...]

    @property
    def replays(self) -> int:
        """The number of replays."""
        return self.records[0].replays

    @property
    def is_held(self) -> bool:
        """Whether somebody still holds its memory."""
        return any(r.is_held for r in self.records)


@dataclass(slots=True)
class Replayable:
    """A plan with its kernels and objects."""

    plan: ir.Plan
    functions: Functions
    constants: Mapping[str, torch.Tensor]
    objects: Mapping[str, Any]
    store: Store | None = None


class Graphs(OrderedDict[Key, list[GraphCall]]):
    """The graphs of a plan by the keys of their calls, the one used longest ago first.

    At most `most` keys have graphs. `misses` counts the calls that did not fit the graph of the
    call before, and `used` has the last miss at which each graph was chosen.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.misses, self.rest = most, 0, REST
        self.used: dict[Key, int] = {}

    def use(self, key: Key) -> None:
        """Note that a graph was chosen."""
        self.used[key] = self.misses
        self.move_to_end(key)

    def idle(self) -> Key | None:
        """The graph used longest ago, if it may make room."""
        oldest = next(iter(self))
        return oldest if self.misses - self.used[oldest] > self.rest else None

    def is_full(self, sizes: Sizes) -> bool:
        """Whether a call of these sizes has no graph, and can get none yet."""
        return len(self) >= self.most and self.idle() is None and all(k[0] != sizes for k in self)


class Replayed:
    """A plan as a callable that takes a list of arguments and empties it.

    `why` says why no graph is made; empty while graphs may be made. `did` counts calls.
    """

    def __init__(self, given: Replayable, plain: ir.Boxed, options: Options) -> None:
        self.given, self.plain, self.options = given, plain, options
        self.made = Graphs(options.cuda_graph_sizes)
        self.seen: Counter[tuple[Key, int]] = Counter()  # calls of a thread without a graph
        self.trials: dict[Key, Trial] = {}
        self.slow: set[Sizes] = set()
        self.did: Counter[str] = Counter()
        self.replays = self.failures = 0
        self.moving, self.refused = set[str](), set[str]()
        self.addresses: dict[Sizes, list[tuple[int, ...]]] = {}
        self.lock = threading.RLock()
        self.why = self.choice = ""
        self.now: ir.Boxed = self.decide
        self.graphed = self.split()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run a call, by the graph of the last call if it fits."""
        return self.now(args)

    @property
    def told(self) -> str:
        """For the report: whether graphs replay the plan, or why not, and how calls were run."""
        head = f"none, since {self.why}"
        if self.graphed is not None:
            count, outside = len(self.graphed.replays), "; ".join(self.graphed.outside)
            head = f"{count}, without what none can hold: {outside}" if outside else "all of it"
        with self.lock:
            did = self.did + Counter({REPLAY: replays(self.made.values())})
        order = dict.fromkeys((WARM_UP, TIMED, RECORD, REPLAY, *sorted(did)))
        calls = ", ".join(f"{did[what]} {what}" for what in order if did[what])
        chosen = f"auto: {self.choice}" if self.choice and self.graphed is not None else ""
        return "; ".join(filter(None, (head, chosen, f"calls: {calls}" if calls else "")))

    def split(self) -> Graphed | None:
        """The plan with its graphs split off; None, with the reason in `why`, if there are none."""
        try:
            if not self.options.native:
                raise Uncaptured("only native code replays graphs, and the option `native` is off")
            p = self.given.plan
            g = graphed(regioned(p, self.refused) if self.refused else p, self.moving)
            self.sizes, self.starts = readers(p, g)
            return g
        except Uncaptured as e:
            self.stop(str(e))
            return None

    def stop(self, why: str) -> None:
        """Make no more graphs."""
        self.why, self.now, self.graphed = why, self.plain, None
        self.drop(*self.made)

    def drop(self, *keys: Key) -> None:
        """Drop graphs."""
        for key in keys:
            self.did[REPLAY] += replays([self.made.pop(key)])
            self.made.used.pop(key, None)
            self.trials.pop(key, None)

    def decide(self, args: list[Any]) -> Sequence[Any]:
        """Run a call that does not fit the last graph."""
        if self.graphed is None or executor.modes():
            return self.plain(args)
        if torch.cuda.is_current_stream_capturing():
            self.did[CAPTURED] += 1
            return self.plain(args)
        try:
            sizes = self.sizes(args)
            if sizes in self.slow:
                return self.plain(args)
            with self.lock:
                self.made.misses += 1
                is_full = self.made.is_full(sizes)
                self.did[FULL] += is_full
            if is_full:  # asked before all else: such a call should cost nothing
                return self.plain(args)
            key = sizes, self.starts(args)
        except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return self.plain(args)  # the plan raises an error or runs a fallback
        with self.lock:
            known, trial = tuple(self.made.get(key, ())), self.trials.get(key)
            is_timed = known and trial is not None and trial.is_plains_turn
            if is_timed:
                self.did[TIMED] += 1
                self.made.use(key)
        if trial is not None and is_timed:
            return trial.timed(trial.plain, self.plain, args)
        for m in known:
            results = m.tried(args) if trial is None else trial.timed(trial.replayed, m.tried, args)
            if results is not None:
                if trial is not None:
                    self.judge(key, trial)
                self.choose(key, m)
                return results
        return self.without(key, args, known)

    def without(self, key: Key, args: list[Any], known: Sequence[GraphCall]) -> Sequence[Any]:
        """Run a call that no graph fits; capture a new graph if such calls repeat."""
        with self.lock:  # other threads may run calls meanwhile
            if self.graphed is None or self.moves(key):
                self.did[MOVED] += self.graphed is not None
                return self.plain(args)
            if len(self.seen) > 64 * self.options.cuda_graph_sizes:
                self.seen.clear()
                self.trials = {k: t for k, t in self.trials.items() if k in self.made}
            self.seen[mine := (key, threading.get_ident())] += 1
            is_timed = self.options.cuda_graphs == "auto" and self.seen[mine] == WARM + 1
            may_be = self.seen[mine] > WARM and not is_timed
            if not may_be:
                what = TIMED if is_timed else WARM_UP
            elif not self.has_room(key):
                held = any(m.is_held for m in known)
                what = FULL if not known else ALIVE if held else BUSY
            elif takes(self.graphed.plan, args):
                return self.make(key, args)
            else:
                what = UNFIT
            self.did[what] += 1
            trial = self.trials.setdefault(key, Trial(gpu_of(self.graphed))) if is_timed else None
        return self.plain(args) if trial is None else trial.timed(trial.plain, self.plain, args)

    def judge(self, key: Key, trial: Trial) -> None:
        """Stop making graphs of these sizes, or any graphs, if launches are faster."""
        with self.lock:
            if not trial.is_over or self.trials.pop(key, None) is None:
                return
            self.choice = str(trial)
            if trial.is_slow:
                self.slow.add(key[0])
                self.drop(key)
                is_only = len(key[0]) == 1 or len(self.slow) >= self.options.cuda_graph_sizes
                if is_only and self.made.keys() <= self.trials.keys():  # no graph was faster
                    self.stop(self.choice)

    def choose(self, key: Key, made: GraphCall) -> None:
        """Make the next call try this graph first."""
        with self.lock:
            if key in self.made:
                self.made.use(key)
                self.now = self.decide if key in self.trials else made.call

    def has_room(self, key: Key) -> bool:
        """Whether a graph may be made, perhaps in place of an unused one."""
        if key in self.made:
            return len(self.made[key]) < TWINS
        if len(self.made) < self.made.most:
            return True
        if (oldest := self.made.idle()) is None:
            return False
        if replays([self.made[oldest]]) < REST:
            self.made.rest *= 2
        self.drop(oldest)
        return True

    def moves(self, key: Key) -> bool:
        """Whether arguments were just found to move, so that other graphs are needed."""
        sizes, starts = key
        before, self.replays = self.replays, replays(self.made.values())
        if self.replays != before:
            self.addresses.clear()
        known = self.addresses.setdefault(sizes, [])
        if starts in known or key in self.made:
            return False
        known.append(starts)
        if len(known) <= MOVES or self.graphed is None:
            return False
        pairs = zip(self.graphed.pinned, known[-2], starts, strict=True)
        self.moving |= {name for name, a, b in pairs if a != b}
        self.again()
        return True

    def again(self) -> None:
        """Split the plan again, because arguments move or an op has to stay outside."""
        self.drop(*self.made)
        self.addresses.clear()
        self.now, self.graphed = self.decide, self.split()

    def make(self, key: Key, args: list[Any]) -> Sequence[Any]:
        """Make graphs for calls like this one, and run this one."""
        assert self.graphed is not None
        g, given = self.graphed, self.given
        names = [i.name if isinstance(i, ir.Input) else "" for i in given.plan.inputs]
        env = {**dict(zip(names, args, strict=True)), **given.constants}
        resolve: Any = lambda a, look: value(a, given.objects, look)
        run = Recorded(self, env, sizes_given(given.plan, args), resolve, key[0][0])
        with torch.cuda.device(g.device), torch.no_grad():
            for s in g.plan.flat:
                run.step(s)
        made = None if run.why else self.linked(g, key, [n for n in names if n], run)
        if made is None:
            why = run.why or "native code does not run it"
            self.did[f"without a graph because {why}"] += 1
            self.failures += 1
            if self.failures == FAILURES and run.refused:
                self.refused.add(run.refused)
                self.failures = 0
                self.again()
            elif not run.why or self.failures == FAILURES:
                self.stop(why)
        else:
            self.did[RECORD] += 1
            self.made.setdefault(key, []).append(made)
            self.choose(key, made)
        results = [resolve(a, run.look) for a in g.plan.outputs]
        args.clear()
        return results

    def linked(self, g: Graphed, key: Key, names: list[str], run: Recorded) -> GraphCall | None:
        """Native code that replays the captured graphs."""
        starts = dict(zip(g.pinned, key[1], strict=True))
        records = dict[str, Record]()
        for r in g.replays:
            pins = [(names.index(n), starts[n]) for n in r.pinned]
            records[r.name] = Record(run.captured[r.name], key[0][0], [*r.reads, *r.writes], pins)
        kept = {n: t for c in run.captured.values() for n, t in c.kept.items()}
        given = self.given
        values = {**given.functions, **given.constants, **kept, **records}
        own = {**given.objects, **{name: c.fresh for name, c in run.captured.items()}}
        ways: tuple[ir.Boxed, Any] = self.decide, lambda args: None
        made = (fast_call(g.plan, values, own, w, given.store) for w in ways)
        found = [pair for pair in made if pair is not None]
        if len(found) < len(ways):
            return None
        (call, sizes), (tried, _) = found
        for record in records.values():
            record.expect([run.sizes[v] for v in sizes if v in run.known])
        return GraphCall(call, tried, tuple(records.values()))


class Recorded(Runner):
    """Runs a plan and captures its graphs; `known` are the sizes of the arguments.

    If a capture fails, `why` says so, and the steps of this and later graphs run one by one: `made`
    are the names that they leave. An op that failed is in `refused`.
    """

    def __init__(
        self, of: Replayed, env: Mapping[str, Any], sizes: Mapping[Var, int], value: Any,
        stream: int,
    ) -> None:  # fmt: skip
        super().__init__(of.given.functions, env, sizes, value, stream)
        assert of.graphed is not None
        self.device, self.gpu = of.graphed.device, gpu_of(of.graphed)
        self.known = frozenset(sizes)
        self.by_name = {r.name: r for r in of.graphed.replays}
        self.captured: dict[str, Captured] = {}
        self.why, self.refused, self.made = "", "", set[str]()

    def step(self, s: ir.Step) -> None:
        """Run one step."""
        is_made = isinstance(s, ir.Keep | ir.Alias) and s.name in self.made
        if is_made or getattr(s, "op", "") == "lenz.renew":  # `launch` renews
            return
        if isinstance(s, ir.Keep):
            found = next(c.kept[s.name] for c in self.captured.values() if s.name in c.kept)
            self.name(s.name, torch.as_strided(found, found.shape, found.stride()).detach())
            return
        super().step(s)

    def call(self, s: ir.CallStep) -> None:
        """Call an eager op."""
        try:
            super().call(s)
        except RuntimeError:
            if not self.why:
                raise
            super().call(s)  # cuSOLVER returns the error of a failed capture once more

    def launch(self, s: ir.LaunchStep) -> list[int]:
        """Capture a graph and launch it, or launch a kernel."""
        if not s.graph:
            return super().launch(s)
        r = self.by_name[s.kernel]
        try:
            if not self.why:
                self.capture(r)
                return []
        except RuntimeError as e:
            self.why = f"capturing it failed: {e}".splitlines()[0]
            self.refused = e.op if isinstance(e, CaptureError) else ""
        for name in r.writes:
            del self.env[name]  # memory that the steps allocate themselves
        for x in r.steps:
            self.step(x)
        self.made |= {n for x in r.steps for n in ir.defined(x)}
        return []

    def capture(self, r: Replay) -> None:
        """Capture a graph and launch it."""
        others = {n: t for c in self.captured.values() for n, t in c.kept.items()}
        reads, writes, pins = ({n: self.env[n] for n in x} for x in (r.reads, r.writes, r.pinned))
        fixed = {**pins, **{n: others[n] if n in others else self.env[n] for n in r.fixed}}
        w = Wanted(r.steps, reads, writes, fixed, r.kept, r.copied, r.mutated, r.draws)
        self.captured[r.name] = loader_of(self.device).capture(w, self, self.gpu)
        self.captured[r.name].start(self.stream)


Reader: TypeAlias = Callable[[Sequence[Any]], tuple[int, ...]]


def readers(p: ir.Plan, g: Graphed) -> tuple[Reader, Reader]:
    """What reads the stream and sizes of a call, and the addresses of its pinned arguments.

    Each call that no graph fits runs them, so what depends on the plan alone is found before.
    """
    names = [i.name if isinstance(i, ir.Input) else "" for i in p.inputs]
    sources, pins, gpu = [*size_sources(p).values()], [names.index(n) for n in g.pinned], gpu_of(g)
    return (
        lambda args: (executor.stream(gpu), *[_divided(size(args), by) for size, by in sources]),
        lambda args: tuple([args[k].data_ptr() for k in pins]),
    )


def gpu_of(g: Graphed) -> int:
    """The number of the GPU."""
    return int(torch.device(g.device).index)


def replays(made: Iterable[Sequence[GraphCall]]) -> int:
    """The number of replays of these graphs."""
    return sum(m.replays for twins in made for m in twins)


def takes(p: ir.Plan, args: Sequence[Any]) -> bool:
    """Whether the plan accepts these arguments without a copy or a fallback."""
    sizes = sizes_given(p, args)
    if any(v.name == name and size > most for v, size in sizes.items() for name, most in p.most):
        return False
    for i, a in zip(p.inputs, args, strict=True):
        if not isinstance(i, ir.Input):
            if type(a) is not int:
                return False
            continue
        t = i.type
        shape, stride = (tuple([evaluate(x, sizes) for x in y]) for y in (t.shape, t.layout.stride))
        if not executor.is_laid_out(a, shape, stride) or not executor.holds_elements(a):
            return False
        is_plain = type(a) in (torch.Tensor, torch.nn.Parameter) and not a.is_conj()
        here = i.anywhere or a.device == torch.device(t.device)
        far = i.name in p.aligned and a.data_ptr() & 15
        if not is_plain or not here or far or a.dtype is not t.dtype.torch:
            return False
    return True


def size_sources(p: ir.Plan) -> dict[Var, tuple[Callable[[Sequence[Any]], int], int]]:
    """How the arguments of a call determine each size: a number, and what it is a multiple by."""
    places, found = dict[str, int](), dict[Var, tuple[Callable[[Sequence[Any]], int], int]]()
    for k, i in enumerate(p.inputs):
        if isinstance(i, ir.Input):
            places[i.name] = k
        elif not isinstance(i.value, Int) and (whole := as_multiple(i.value)):
            found.setdefault(whole[0], (itemgetter(k), whole[1]))
    for s in p.binds:
        size = torch.Tensor.stride if s.stride else torch.Tensor.size
        found.setdefault(s.var, (partial(_size_at, places[s.source], size, s.dim), s.factor))
    return found


def _size_at(k: int, size: Callable[..., int], dim: int, args: Sequence[Any]) -> int:
    return size(args[k], dim)


def sizes_given(p: ir.Plan, args: Sequence[Any]) -> dict[Var, int]:
    """The sizes that a call's arguments determine."""
    return {v: _divided(size(args), factor) for v, (size, factor) in size_sources(p).items()}


def _divided(whole: int, by: int) -> int:
    if whole % by:
        raise ValueError(f"{whole} is not a multiple of {by}")
    return whole // by
