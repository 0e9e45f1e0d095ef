"""The backend of torch.compile: from a graph of Dynamo to a callable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.fx import GraphModule

from lenz.debug import torch_logs
from lenz.debug.counters import count, count_schedule
from lenz.debug.failing import recorder_of, say, script, why
from lenz.debug.names import arguments_of, readable
from lenz.debug.progress import Progress
from lenz.debug.trace import Recorder, new_folder
from lenz.errors import LenzError, Unsupported, UserError
from lenz.frontend import FxProgram, caller
from lenz.frontend.calls import unwritable
from lenz.frontend.floats import fix_floats, without_floats
from lenz.frontend.levels import inside_level
from lenz.frontend.passing import is_message, is_of_lenz, passing
from lenz.frontend.saved import is_asked
from lenz.frontend.session import is_again, numbered, until_reset
from lenz.frontend.values import has_fakes
from lenz.frontend.wide import bound_integers
from lenz.frontend.wrapping import now
from lenz.ir.interned import uncollected
from lenz.ir.plan import Boxed
from lenz.keys import has_key, key_of, native_names
from lenz.machines import is_known, loader_of
from lenz.options import Options
from lenz.recall import context, recall
from lenz.records import dataclass, field, replace
from lenz.runtime.store import store_in
from lenz.warm import TraceRecord, trace_of

if TYPE_CHECKING:  # a cached graph needs no compiler, which takes 0.3 s to import
    from lenz.context import Context
    from lenz.debug.watch import Watching
    from lenz.pipeline import Compiled

# Modes of torch.compile. On CPUs all of them mean the default: only GPU kernels have tiles to
# choose from, and only GPUs have graphs.
MODES: Mapping[str, Mapping[str, object]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": "auto"},
    "max-autotune": {"autotune": True, "cuda_graphs": "auto"},
    "max-autotune-no-cudagraphs": {"autotune": True},
}


class Watcher(Protocol):
    """Learns the outcome of each graph, and may wrap the callable."""

    def compiled(self, made: Compiled, recorder: Recorder) -> Boxed:
        """A graph was compiled: return `made.call` or a wrapper of it."""
        ...

    def refused(self, program: FxProgram, why: str, run: Boxed) -> Boxed:
        """A graph will run in eager through `run`: return that or a wrapper of it."""
        ...

    def untraced(self, name: str, kind: str, why: str) -> None:
        """A graph could not be captured, or its backward half, and will run in eager."""
        ...


def backend(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph; this is what `torch.compile(fn, backend="lenz")` calls.

    Raises UserError for an unknown mode or option.
    """
    chosen = _chosen(mode, options)
    if is_asked():
        return _savable(gm, example_inputs, chosen)
    with uncollected():
        run = compile_graph(gm, example_inputs, chosen)
    if chosen.compare_eager and not chosen.watched:
        from lenz.first_calls.compare import compared

        run = compared(run, gm, example_inputs, numbered())
    return run


def _chosen(mode: str | None, options: Mapping[str, object] | None) -> Options:
    """The options of a mode, overridden by `options`."""
    try:
        if mode is not None and mode not in MODES:
            raise UserError(f"unknown mode {mode!r}", hint=f"modes are {', '.join(MODES)}")
        given = {**MODES.get(mode or "default", {}), **(options or {})}
        return Options.from_environment(given)
    except UserError as e:
        raise passing(e) from None


def compile_graph(
    gm: GraphModule, example_inputs: list[Any], options: Options,
    watcher: Watcher | None = None, name: str = "", watching: Sequence[Watching] = (),
) -> Callable[..., Any]:  # fmt: skip
    """The backend with parsed options. `name` names the graph in logs, reports and folders.

    `watcher` sees what is compiled, `watching` how it runs.
    """
    progress = Progress(options.progress)
    unit = _Unit(gm, options, watcher, caller(), (), progress, watching)
    title = name or numbered()
    until_reset()
    count(recompiles=is_again())
    try:
        fix_floats(gm, example_inputs)
        if has_fakes(example_inputs):
            raise Unsupported("an argument is a fake tensor, which has no memory for kernels")
        tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
        if any(x.is_mkldnn for x in tensors):  # their fakes are not
            raise Unsupported("an argument has the opaque layout of oneDNN")
        if any(x._is_zerotensor() for x in tensors):
            raise Unsupported("an argument is zeros without memory")
        if why_eager := inside_level() or unwritable(gm, example_inputs):
            raise Unsupported(why_eager)
        bound_integers(gm, example_inputs)
        unit.trace = None if unit.is_watched else trace_of(gm, example_inputs, options, unit.named)
        run = unit.trace.load(_run_of, example_inputs) if unit.trace is not None else None
        unit.arguments = arguments_of(gm)  # loading may drop some
        if run is not None:
            return run
        if options.background and not unit.is_watched:
            from lenz.first_calls.background import in_background

            if (later := in_background(unit.trace, options, title, _run_of)) is not None:
                return later
        if unit.trace is not None or store_in(options) is None or unit.is_watched:
            start(example_inputs, options)  # else the halves may be in the cache
        with unit.line.at(title, "trace"):
            return unit.captured(example_inputs, title, unit.failed)
    except Exception as e:  # a fault of lenz, torch or the program: eager shows which
        if is_message(e):
            raise
        try:
            unit.failed(e, "capture")
        except LenzError as fault:
            raise passing(fault) from fault.__cause__
        return gm.forward


def _savable(gm: GraphModule, inputs: list[Any], options: Options) -> Callable[..., Any]:
    """Compile a graph that torch will save. The callable says so if it cannot be saved."""
    from lenz.artifact.saved import saved

    places = gm.graph.find_nodes(op="placeholder")
    fix_floats(gm, inputs)

    def drops() -> list[int]:
        left = set(gm.graph.find_nodes(op="placeholder"))
        return [k for k, n in enumerate(places) if n not in left]

    def entry_of(options: Options) -> Mapping[str, Any]:
        if options.passes or not has_key(options):
            raise UserError("passes, launch_groups, verify, fuel and ops of your own prevent it")
        trace = trace_of(gm, inputs, options, lambda p: p)
        if trace is None or has_fakes(inputs):
            raise UserError("it is more than torch's own ops on plain, unshared tensors")
        entry = trace.entry()
        if entry is not None and entry["halves"].keys() != {"forward"}:
            trace.ask(entry, inputs)
            return entry
        compile_for(gm, inputs, options, trace.key, numbered())
        if (entry := trace.entry()) is None:
            raise UserError("part of it is not plain data")
        return entry

    return saved(options, entry_of, lambda: compile_graph(gm, inputs, options), drops)


def compile_for(gm: GraphModule, inputs: list[Any], options: Options, key: str, name: str) -> None:
    """Compile a graph loaded from another process into the cache, under the given key.

    Both halves are compiled now. Errors of the compilation propagate.
    """
    unit, store = _Unit(gm, options, None, "", ()), store_in(options)
    assert store is not None
    unit.trace = TraceRecord(gm, "", options, store, unit.named)
    unit.trace.key = key
    start(inputs, options)
    with now():
        unit.captured(inputs, name)


def start(values: Iterable[object], options: Options) -> None:
    """Start the compilers for the devices of these tensors: they will be needed."""
    types = dict.fromkeys(x.device.type for x in values if isinstance(x, torch.Tensor))
    for type in filter(is_known, types):
        loader_of(type).start()
    if options.native:
        from lenz.plan.native_link import begun

        begun("cuda" in types, store_in(options))  # one library serves a plan on both


@dataclass(slots=True)
class _Unit:
    """One graph of Dynamo, for which AOTAutograd requests one or two programs."""

    gm: GraphModule
    options: Options
    watcher: Watcher | None
    called: str
    arguments: Sequence[str]  # asked for at once: Dynamo forgets their names
    line: Progress = field(default_factory=Progress)
    watching: Sequence[Watching] = ()
    since: float = field(default_factory=time.perf_counter)
    trace: TraceRecord | None = None

    @property
    def is_watched(self) -> bool:
        """Whether somebody watches the stages, so that all of them must run."""
        shown = bool(set(self.options.logs) - {"time"}) or self.options.debug
        shown = shown or torch_logs.any_is_on() or self.options.watched
        return shown or self.watcher is not None or bool(self.watching)

    def captured(
        self, inputs: list[Any], name: str,
        failed: Callable[[Exception, str], None] | None = None,
    ) -> Callable[..., Any]:  # fmt: skip
        """The callable from AOTAutograd, traced again without floats that must be constants."""
        from lenz.frontend.capture import capture  # and AOTAutograd, which takes 0.2 s

        native, how = native_names(store_in(self.options)), self.options

        def trace() -> Callable[..., Any]:
            self.arguments = arguments_of(self.gm)
            told = native, name, self.entered, failed
            return capture(self.gm, inputs, self.compile_fx, how, *told)

        run, floats = without_floats(self.gm, inputs, trace)
        if self.trace is not None:
            self.trace.traced(floats)
        return run

    def entered(self, kind: str, gm: GraphModule) -> None:
        """Time before a backward graph belongs to the user or to the forward graph."""
        if kind == "backward":
            self.since = time.perf_counter()

    def compile_fx(self, program: FxProgram) -> Boxed:
        """FxProgram -> callable. A program that cannot be compiled runs in eager, if allowed."""
        program = self.named(program)
        options = self.options
        folder = None
        if options.debug and options.debug_dir is not None:
            folder = new_folder(options.debug_dir, program.name)
        recorder = Recorder(program.name, options.logs, folder, line=self.line)
        recorder.times["trace"] = time.perf_counter() - self.since
        try:
            with recorder.stage("other"):
                recorder.text("dynamo", lambda: self.gm.print_readable(print_output=False))
                recorder.text("runnable", lambda: script(program.gm, options))
                with recorder.stage("target"):
                    cx = context(options, recorder)
                with recorder.stage("recall"):
                    key = key_of(program, cx)
                    run: Any = None if self.is_watched else recall(program, cx, key, _run_of)
                count(graphs=1, cache_hits=run is not None, cache_misses=run is None)
                made = None if run else self.compiled(program, cx, recorder, key)
                if self.trace is not None:
                    self.trace.note(program, key, made.plan if made is not None else None)
            recorder.finish()
        except Exception as e:  # noqa: BLE001  # any other error is a bug too
            return self.eager(program, why(e, recorder, program.kind, options))
        finally:
            self.since = time.perf_counter()
        if made is not None:
            if self.watching or options.watched:
                from lenz.pipeline import watched

                made = watched(made, cx, self.watching)
            run = made.call if self.watcher is None else self.watcher.compiled(made, recorder)
            run.strides = made.strides
        return run  # type: ignore[no-any-return]  # an Any, because it has an attribute

    def compiled(
        self, program: FxProgram, cx: Context, recorder: Recorder, key: str | None
    ) -> Compiled:
        """Compile the program and cache it under `key`."""
        start((p.value for p in program.placeholders), self.options)
        with recorder.stage("import"):
            from lenz.pipeline import compile_program
        made = compile_program(program, cx, key)
        count_schedule(made.schedule)
        for file, data in made.files.items() if recorder.folder is not None else ():
            recorder.binary(file, data)
        return made

    def failed(self, e: Exception, kind: str) -> None:
        """Raise the error that stopped a capture, or warn that the graph runs in eager."""
        if isinstance(e, LenzError) or is_of_lenz(e):
            told = why(e, recorder_of(self.gm, kind, self.options), kind, self.options)
        elif self.options.on_error == "raise":
            raise e
        else:
            told = f"torch could not trace a graph, which runs in eager: {type(e).__name__}: {e}"
        say(told)
        count(eager=1)
        if self.watcher is not None:
            self.watcher.untraced(f"{numbered()}.{kind}", kind, told)

    def eager(self, program: FxProgram, why: str) -> Boxed:
        """Run the program op by op, with one warning."""
        say(why)
        count(eager=1)
        run: Boxed = program.eager()
        return run if self.watcher is None else self.watcher.refused(program, why, run)

    def named(self, program: FxProgram) -> FxProgram:
        """The program with the user's names for its arguments, and the source line of the call."""
        places = tuple(
            replace(p, source=readable(p.source, self.arguments)) for p in program.placeholders
        )
        return replace(program, placeholders=places, called=self.called)


def _run_of(program: FxProgram, cx: Context) -> Boxed:
    """Run the program under other options, from the cache or compiled."""
    from lenz.pipeline import run_of

    return run_of(program, cx)


class FxBackend:
    """A backend that hands each compiled graph on as a `torch.fx.GraphModule`.

    Subclass it, override `compile_graph`, and give an instance to torch.compile:

        class Mine(lenz.FxBackend):
            def compile_graph(self, gm):
                return gm

        torch.compile(f, backend=Mine())
    """

    def compile_graph(self, gm: GraphModule) -> Callable[..., Sequence[Any]]:
        """Return a function of the arguments of `gm` that returns its results.

        The nodes of `gm` are kernels, eager calls and memory (`lenz/plan/fx.py`). They are aten ops
        if lenz cannot compile the graph.
        """
        return gm

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: list[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> Callable[..., Any]:
        """Compile one Dynamo graph, as `backend` does."""
        # An FX graph has no branch to a fallback for calls that break an assumption.
        given = {**(options or {}), "aligned": False, "size_facts": False}
        return compile_graph(gm, example_inputs, _chosen(mode, given), self)

    def compiled(self, made: Compiled, recorder: Recorder) -> Boxed:
        """Hand on a graph of kernels."""
        with recorder.stage("plan"):
            return self.boxed(made.fx(), made.program)

    def refused(self, program: FxProgram, why: str, run: Boxed) -> Boxed:
        """Hand on a graph of aten ops."""
        program.gm.recompile()  # the code is that of the graph before it was normalised
        return self.boxed(program.gm, program)

    def untraced(self, name: str, kind: str, why: str) -> None:
        """Hand on nothing: there is no graph of aten ops."""

    def boxed(self, gm: GraphModule, program: FxProgram) -> Boxed:
        """The user's function as a callable that takes a list of arguments and empties it."""
        kernels = [n.meta.get("kernel") for n in gm.graph.nodes]
        gm.meta.update(kind=program.kind, name=program.name)
        try:
            run = self.compile_graph(gm)
        except Exception as e:  # the user's function may raise anything
            told = f"{type(self).__name__}.compile_graph failed on the {program.kind} graph"
            raise UserError(f"{told}: {type(e).__name__}: {e}") from e
        if not callable(run):
            raise UserError(f"{type(self).__name__}.compile_graph returned {run!r}, not a function")

        def call(args: list[Any]) -> Sequence[Any]:
            given = tuple(args)
            args.clear()
            return run(*given)

        call.__dict__["kernels"] = kernels  # `run` needs them; the user's graph may not
        return call
