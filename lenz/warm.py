"""The warm start: a Dynamo graph that another process compiled is not traced again.

A graph of Dynamo becomes one or two programs, each with an entry in the cache (`recall.py`). A
trace record names them and keeps AOTAutograd's metadata; with it, neither AOTAutograd nor a pass of
lenz runs. The text of the graph is its key (`frontend/asked.py`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule

from lenz import keys
from lenz.context import Context
from lenz.debug.counters import count
from lenz.debug.failing import fault, in_eager, recorder_of
from lenz.errors import InternalError
from lenz.frontend import FxProgram, wrapping
from lenz.frontend.asked import Moment, asked
from lenz.frontend.floats import drop_floats
from lenz.frontend.identity import Untold
from lenz.frontend.levels import unbatched
from lenz.frontend.program import GraphKind, boxed, boxed_eager
from lenz.frontend.session import interning
from lenz.frontend.untraced import outside
from lenz.frontend.wrapping import CAN_FORCE, are_leaves
from lenz.halves import Half, loaded_half, plan_in
from lenz.ir.plan import Boxed, Plan
from lenz.loading import complete
from lenz.options import Options
from lenz.recall import context
from lenz.respecialise import Compile, Needs, Respecialised, needs_of
from lenz.runtime.store import Store, store_in

Renaming: TypeAlias = Callable[[FxProgram], FxProgram]
KINDS: Sequence[set[str]] = ({"inference"}, {"forward"}, {"forward", "backward"})


class TraceRecord:
    """One Dynamo graph: its key, and its compiled halves."""

    def __init__(
        self, gm: GraphModule, text: str, options: Options, store: Store, named: Renaming
    ) -> None:
        self.gm, self.options, self.store, self.named = gm, options, store, named
        self.cx: Context = context(options)
        devices = {v.device for v in self.inputs if isinstance(v, torch.Tensor)}
        self.key = keys.key_with(text, self.cx, devices)
        self.moment = Moment()
        self.halves: dict[str, Half] = {}
        self.metadata: Any = None
        self.guards: list[str] | None = None
        self.floats: list[list[int]] = []  # places of the arguments that were dropped, in turns
        self.strides: Any = None  # of the results of a loaded forward half
        self._programs = dict[str, FxProgram]()
        self._graphs = dict[str, GraphModule]()

    @property
    def inputs(self) -> list[Any]:
        """The arguments as Dynamo traced them."""
        return [n.meta["example_value"] for n in self.gm.graph.find_nodes(op="placeholder")]

    # -- recording a graph that is compiled now

    def note(self, program: FxProgram, key: str | None, plan: Plan | None) -> None:
        """Record a program cached under `key`, with its plan if it was compiled now."""
        data = self.store.get("graph", key) if key is not None else None
        if data is None:
            return
        p = plan or plan_in(data)
        half = _told(p, needs_of(p, program), self.store)
        if half is not None:
            gives = [o.node is not None for o in program.outputs]
            self.halves[program.kind] = {**half, "key": key, "gives": gives}
            self.keep()

    def traced(self, floats: Sequence[list[int]]) -> None:
        """AOTAutograd is done with the graph; its backward half may be compiled later.

        `floats` are the places of the arguments that were dropped, in turns.
        """
        self.floats += floats
        try:
            self.metadata, self.guards = wrapping.described(), self.moment.told()
        except Untold:
            return
        self.keep()

    def keep(self) -> None:
        """Write the trace once it is complete; again when the backward half is compiled."""
        kinds = set(self.halves)
        if self.metadata is None or kinds not in KINDS:
            return
        try:
            known, detach = wrapping.as_json(self.metadata), []
            if "backward" in kinds:
                detach = wrapping.detached(self.metadata, self.halves["backward"]["gives"])
            elif "forward" in kinds and not (CAN_FORCE and are_leaves(self.metadata)):
                return
        except Untold:
            return
        entry = {
            "metadata": known, "detach": detach, "halves": self.halves, "guards": self.guards,
            "floats": self.floats,
        }  # fmt: skip
        if keys.sources(again=True):
            self.store.put("trace", self.key, json.dumps(entry).encode())

    # -- loading a graph that was compiled before

    def entry(self) -> dict[str, Any] | None:
        """The graph's entry in the cache. Raises ValueError if it is damaged."""
        data = self.store.get("trace", self.key)
        return None if data is None else dict(json.loads(data))

    def ask(self, entry: Mapping[str, Any], inputs: list[Any]) -> None:
        """Drop the arguments of the graph that the entry lacks, and add its guards."""
        self.floats = [drop_floats(self.gm, inputs, places) for places in entry["floats"]]
        self.moment.ask(entry["guards"])

    def load(self, again: Compile, inputs: list[Any]) -> Callable[..., Any] | None:
        """The callable of the graph; None if the cache lacks a part of it.

        It takes `inputs` without the floats that are constants: they are dropped from this list
        and from the graph.
        """
        try:
            if (entry := self.entry()) is None:
                return None
            metadata, halves = wrapping.from_json(entry["metadata"]), entry["halves"]
            with interning():
                made = {
                    kind: loaded_half(half, self.store, self.options, Retraced(self, again, kind))
                    for kind, half in halves.items()
                }
            if None in made.values():
                return None
            first, second = made.get("inference") or made["forward"], made.get("backward")
            self.strides = first.strides
            if "forward" in made:
                second = second or Late(self, again)
                second = unbatched(second, lambda: boxed_eager(self.backward()))
                second = outside(second, "a backward pass compiled by lenz")
            run = wrapping.wrapped(
                metadata, entry["detach"], boxed(first), second and boxed(second), self.backward
            )
            self.ask(entry, inputs)
            self.metadata, self.halves, self.guards = metadata, halves, entry["guards"]
            count(graphs=len(halves), cache_hits=len(halves))
            return run
        except (LookupError, TypeError, ValueError, AttributeError):
            return None  # damaged, or of another version

    def half(self, kind: str, make: Callable[[FxProgram, Context], Boxed]) -> Boxed:
        """Trace a half of the loaded graph, and return `make` of it.

        A half that cannot be made runs in eager. Raises an InternalError if it cannot be traced
        either, or if the options ask for that.
        """
        recorder = recorder_of(self.gm, kind, self.options)
        try:
            if kind not in self._programs:  # the halves share one trace
                self._again()
            cx = context(self.options, recorder)
            return make(self._programs[kind], cx)
        except Exception as e:  # the caller does not expect a compiler here
            if kind not in self._graphs:
                raise fault(e, recorder, kind, self.options) from e
            return in_eager(e, recorder, kind, self.options, boxed_eager(self._graphs[kind]))

    def backward(self) -> GraphModule:
        """The backward half from AOTAutograd, for compiled autograd."""
        if "backward" not in self._graphs:
            self._again()
        return self._graphs["backward"]

    def _again(self) -> None:
        """Trace the graph with AOTAutograd, and keep its halves and their programs.

        Errors of a half are raised after AOTAutograd is done.
        """
        from lenz.frontend.calls import copied
        from lenz.frontend.capture import capture

        def entered(kind: GraphKind, gm: GraphModule) -> None:
            self._graphs[kind] = copied(gm)

        def collect(program: FxProgram) -> Boxed:
            self._programs[program.kind] = self.named(program)

            def run(args: list[Any]) -> Sequence[Any]:
                raise InternalError("a graph that is traced again does not run")

            if program.kind == "forward":  # the loaded forward half decides what is saved
                run.__dict__["strides"] = self.strides
            return run

        def failed(e: Exception, kind: GraphKind) -> None:  # torch may drop what is raised here
            faults.append(e)

        faults, native, name = list[Exception](), keys.native_names(self.store), "graph"
        told = native, name, entered, failed
        with self.moment.again(), wrapping.now():
            capture(self.gm, self.inputs, collect, self.options, *told)
        if faults:
            raise faults[0]


def trace_of(
    gm: Any, inputs: Sequence[Any], options: Options, named: Renaming
) -> TraceRecord | None:
    """The trace record of a Dynamo graph; None if it has no text, or must be compiled anyway.

    `named` gives programs the user's names.
    """
    store = store_in(options)
    if store is None or not keys.has_key(options) or options.passes:
        return None
    text = asked(gm, inputs)
    return None if text is None else TraceRecord(gm, text, options, store, named)


class Late:
    """A backward half that no process has needed so far, traced and compiled at first call.

    torch does the same with new graphs.
    """

    def __init__(self, trace: TraceRecord, again: Compile, kind: str = "backward") -> None:
        self._trace, self._again, self._kind = trace, again, kind
        self._lock = threading.RLock()
        self._made: Boxed | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run on boxed arguments."""
        return self.made()(args)

    def made(self) -> Boxed:
        """The half, which the first call makes."""
        with self._lock:
            if self._made is None:
                self._made = self._trace.half(self._kind, self._compiled)
        return self._made

    def _compiled(self, program: FxProgram, cx: Context) -> Boxed:
        with interning():
            run = self._again(program, cx)
        self._trace.note(program, keys.key_of(program, cx), None)
        return run


class Retraced(Late):
    """The fallback of a half that was not traced; the first call traces its graph."""

    def __call__(self, args: list[Any], aligned: bool = True) -> Sequence[Any]:
        """Run on boxed arguments; `aligned` is False if one is not at a multiple of 16 bytes."""
        made = self.made()
        return made(args, aligned) if isinstance(made, Respecialised) else made(args)

    def _compiled(self, program: FxProgram, cx: Context) -> Boxed:
        return Respecialised(program, cx, self._again)


def _told(p: Plan, needs: Needs, store: Store) -> Half | None:
    """What a plan needs from its program, as JSON; None if it needs more than data."""
    if needs.modules or p.objects:
        return None
    named, data = complete(p, needs.constants)
    for content, packed in data.items():
        store.put("constant", content, packed)
    return {"constants": {c.name: [c.content, c.type.device] for c in named.constants}}
