"""One check of a program: eager, the graph after every pass, the schedule, and compiled code agree.

A program is run in one of these ways:

cpu         as users get it
oracle      with the interpreter beside it, after every pass
guarded     with kernels on memory between forbidden pages; "guarded avx2" and "guarded sse2" for
            older processors
triton      with the kernels of a GPU in Triton's interpreter; "triton cubins" compiles them too,
            and "tiny" has tiny tiles
threads     called by several threads at once
steps       as steps of training
options     with options by chance
warm        a second time, from the disk cache
exported    by way of an artifact
graphs      called until CUDA graphs replay it; on a CPU, captures are simulated. Also "graphs
            threads" and "graphs steps"
aot_eager   by torch's own half alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves

import lenz
from lenz.errors import Unsupported
from lenz.frontend import FxProgram
from lenz.frontend.calls import unwritable
from lenz.frontend.capture import capture
from lenz.ir.graph import Graph
from lenz.ir.interp import RunKernel, interp, interp_schedule
from lenz.ir.kernel import Schedule
from lenz.ir.plan import Boxed
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.ir.verify import verify
from lenz.lower import lower, native_ops
from lenz.opt import PASSES
from lenz.options import Options
from lenz.pipeline import compile_program, context
from lenz.schedule import schedule
from tests.fuzz.artifacts import Skipped, exported
from tests.fuzz.compare import Outcome, agree, outcome
from tests.fuzz.lies import honest
from tests.fuzz.program import Program, analyse
from tests.fuzz.runs import CALLS, STEPS, agree_on_steps, some_options, steps, threaded
from tests.simulated_graphs import cut_at_random, simulate

__all__ = ["Notes", "Stages", "compare", "copied", "failure"]

# How it is called; the code is that of "cpu".
CALLED = ("threads", "steps", "graphs", "graphs threads", "graphs steps")
WHOLE = ("options", "warm")  # by the backend that users name
PLAIN = ("cpu", *CALLED)
REPLAYED = 4  # calls: one by launches, one that is captured, two that are replayed
VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # what asks for values raises
# A result that is written later is one that lenz has saved, and eager another: README, "Limits".
SAVED = "RuntimeError: one of the variables needed for gradient computation has been modified"
# Dynamo cannot write the guard of a decomposition that aot_eager has not: torch_base_symbols.py.
BASES = "AssertionError: sources must not be empty for symbol"
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 2e-1, torch.float16: 5e-2}
"""Relative to the largest value, between graphs that round and sum in other orders."""


@dataclass(slots=True)
class Stages:
    """Compiles graphs; the callables first run every stage on clones of the arguments."""

    options: Options
    way: str
    seen: list[str]
    kernels: int = 0

    def backend(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """The backend, as Dynamo calls it; writes that lenz refuses run in eager, as for users."""
        if unwritable(gm, inputs):
            return gm.forward
        return capture(gm, inputs, self.compile_fx, self.options, native_ops())

    def compile_fx(self, p: FxProgram) -> Boxed:
        """The callable of one graph; what lenz refuses runs in eager, as for users."""
        self.seen += [str(n.target) for n in p.nodes]
        try:
            return self.compiled(p)
        except Unsupported:
            return p.eager()

    def compiled(self, p: FxProgram) -> Boxed:
        """The callable, with the checks of the chosen way before it."""
        graphs: dict[str, Graph] = {}
        run_kernel: RunKernel | None = None
        strides: Any = ()  # as users get them: the backward half is compiled for these
        ends = "tangents"  # what eager saved, where it runs in place of lenz, has its own strides
        if self.way in PLAIN:
            made = compile_program(p, context(self.options))
            plain: Any = made.call
            plain.strides = made.strides
            return plain  # type: ignore[no-any-return]  # an Any, since it has an attribute
        if self.way.startswith(("oracle", "guarded")):
            graphs, s = self.stages(p)
            made = compile_program(p, context(self.options))
            call, strides = made.call, made.strides
            if self.way.startswith("guarded"):
                from tests.codegen.codegen_run import targets
                from tests.fuzz.guarded import kernel_runner

                graphs, known = {}, targets()
                run_kernel = kernel_runner(s, known.get(self.way[8:], known["host"]))
        else:
            from tests.gpu_oracle import (
                TINY,
                cubins,
                interpreted,
                joined,
                kernels_of,
                lowered_there,
                scheduled,
            )

            tiles = TINY if self.way.startswith("tiny") else None
            s = scheduled(lowered_there(p), tiles, emulate_rounding=has_halves(p))
            s = s if tiles else joined(s)
            self.kernels += len(kernels_of(s))
            if self.way.endswith("cubins"):
                cubins(s)
            call, run_kernel, ends = as_told(p), interpreted, ""

        def run(args: list[Any]) -> Sequence[Any]:
            if p.kind == "backward":
                args[:] = laid(p, args, ends)
            try:
                want, inputs = wanted(p, args)
            except RuntimeError:
                return call(args)  # torch's own aten.copy fails on an input copied to itself
            for name, g in graphs.items():
                got = interp(g, apart(args), _constants(p, g), objects=p.modules)
                halves = has_halves(p)
                compare(got.outputs, want, f"outputs after {name}\n{show(g)}", halves)
                compare(got.inputs, inputs, f"inputs after {name}\n{show(g)}", halves)
            run_schedule(s, p, args, want, inputs, run_kernel)
            return call(args)

        told: Any = run
        told.strides = strides
        return told  # type: ignore[no-any-return]  # as above

    def stages(self, p: FxProgram) -> tuple[dict[str, Graph], Schedule]:
        """The graph after each pass, and its schedule; all of them verified and read back.

        Half types are rounded as in eager, so that differences of near values agree as well; the
        callable is compiled with the options as they are.
        """
        rounding = self.options.emulate_rounding or has_halves(p)
        cx = context(replace(self.options, emulate_rounding=rounding))
        g = lower(p, cx)
        graphs = {"lower": g}
        for name, run in PASSES.items():
            graphs[name] = run(graphs[[*graphs][-1]], cx)
        unique: dict[str, Graph] = {}
        for name, g in graphs.items():
            if g in unique.values():
                continue
            unique[name] = g
            verify(g)
            assert read(show(g)) == g, f"after {name} the text reads back as another graph"
        s = schedule(g, cx)
        verify(s)
        assert read(show(s)) == s, "the schedule's text reads back as another one"
        return unique, s


def has_halves(p: FxProgram) -> bool:
    """True for a graph with values of a half type."""
    values = tree_leaves([n.meta.get("val") for n in p.gm.graph.nodes])
    return any(getattr(v, "dtype", None) in (torch.float16, torch.bfloat16) for v in values)


def as_told(p: FxProgram) -> Boxed:
    """The graph op by op, where custom ops give what their fake kernels tell, as in a plan."""

    def call(args: list[Any]) -> Sequence[Any]:
        with honest():
            return tuple(torch.fx.Interpreter(p.gm).boxed_run(args))

    return call


def laid(p: FxProgram, args: Sequence[Any], kind: str) -> list[Any]:
    """The arguments, those of a kind with the strides that tracing took: gradients come with any.

    So have all whose strides are not known as numbers, with their order: of those the forward half
    does not say what it has, and a plan copies what lies otherwise.
    """

    def hint(s: Any) -> int:
        return int(s if isinstance(s, int) else s.node.hint)

    def one(a: Any, told: Any, name: str) -> Any:
        if not isinstance(a, torch.Tensor) or same_places(a, told):
            return a  # what is expanded, an argument above all, stays so
        is_known = all(isinstance(s, int) for s in (*told.shape, *told.stride()))
        if is_known and kind not in name:
            return a
        if is_known:
            return torch.empty_strided(a.shape, told.stride(), dtype=a.dtype).copy_(a)
        order = sorted(range(a.dim()), key=lambda d: (-hint(told.stride(d)), d))
        steps = [a.stride(d) for d in order if a.shape[d] != 1]
        if "tangents" not in name and 0 not in steps and steps == sorted(steps, reverse=True):
            return a  # the forward saved it so, with gaps that depend on sizes
        inverse = [order.index(d) for d in range(a.dim())]
        return a.permute(order).contiguous().permute(inverse)

    return [one(a, h.value, h.name) for a, h in zip(args, p.placeholders, strict=True)]


def same_places(a: torch.Tensor, told: torch.Tensor) -> bool:
    """True where a has the strides of `told`, by their hints, or both are expanded."""
    triples = [*zip(a.stride(), told.stride(), a.shape, strict=True)]
    if any(s == 0 and isinstance(t, int) and t == 0 for s, t, _ in triples):
        return True
    return all(n == 1 or s == (t if isinstance(t, int) else t.node.hint) for s, t, n in triples)


def wanted(p: FxProgram, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What the graph gives op by op, with the layouts that it was told, and the arguments then."""
    inputs = apart(args)
    with honest():
        given = tuple(torch.fx.Interpreter(p.gm).boxed_run(list(inputs)))
    found = [t.clone() if isinstance(t, torch.Tensor) else t for t in given]
    return found, inputs


def run_schedule(
    s: Schedule,
    p: FxProgram,
    args: Sequence[Any],
    want: Sequence[Any],
    inputs: Sequence[Any],
    run_kernel: RunKernel | None,
) -> None:
    """Run a schedule on clones of arguments, and compare."""
    options: dict[str, Any] = {} if run_kernel is None else {"run_kernel": run_kernel}
    constants = _constants(p, s.graph)
    try:
        got = interp_schedule(s, apart(args), constants, objects=p.modules, **options)
    except Exception as e:
        raise AssertionError(f"{type(e).__name__}: {e}\n{show(s)}") from e
    compare(got.outputs, want, f"outputs of the schedule\n{show(s)}", has_halves(p))
    compare(got.inputs, inputs, f"inputs after the schedule\n{show(s)}", has_halves(p))


def _constants(p: FxProgram, g: Graph) -> list[torch.Tensor]:
    targets = {n.name: str(n.target) for n in p.gm.graph.nodes if n.op == "get_attr"}
    return [p.constants[targets[c.name]] for c in g.constants]


def copied(args: Sequence[Any]) -> list[Any]:
    """Clones with the same strides, also of tensors whose elements overlap or share memory."""
    bases: dict[int, torch.Tensor] = {}

    def one(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        t = t.detach()
        memory = t.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8, device=t.device).set_(memory)
        base = bases.setdefault(memory.data_ptr(), raw.clone() if memory.nbytes() else raw)
        new = torch.empty(0, dtype=t.dtype, device=t.device)
        new.set_(base.untyped_storage(), t.storage_offset(), t.shape, t.stride())
        # Bits of a tensor, which its memory does not tell.
        new = new.conj() if t.is_conj() else new
        return torch._neg_view(new) if t.is_neg() else new

    return [one(a) for a in args]


def apart(args: Sequence[Any]) -> list[Any]:
    """The same, each with memory of its own: to a graph, all its arguments are apart.

    torch misses some that overlap (docs/upstream/torch_overlapping_views.py).
    """
    return [x for a in args for x in copied([a])]


def compare(got: Sequence[Any], want: Sequence[Any], message: str, halves: bool = False) -> None:
    """Assert that what two forms of a graph give agrees, within the tolerance of the type.

    With `halves` that of f32 is a half type's: it may be computed from one, and eager rounds on the
    way in ops that lenz computes in one piece, such as a mean of squares.
    """
    assert len(got) == len(want), message
    for k, (x, y) in enumerate(zip(got, want, strict=True)):
        if not isinstance(y, torch.Tensor):
            assert x == y, f"value {k}: {x} instead of {y}\n{message}"
            continue
        assert x.dtype is y.dtype and x.shape == y.shape, f"value {k}: {x} for {y}\n{message}"
        if y.is_complex():
            x, y = (torch.view_as_real(t.resolve_conj()) for t in (x, y))
        if torch.equal(x, y):
            continue
        tol = TOLERANCE.get(y.dtype, 0.0)
        if halves and y.dtype in (torch.float32, torch.float64):
            tol = TOLERANCE[torch.float16]
        finite = y[y.isfinite()].double()
        scale = max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
        torch.testing.assert_close(
            x, y, rtol=tol, atol=tol * scale, equal_nan=True,
            msg=lambda m: f"value {k}: {m}\n{message}",
        )  # fmt: skip


@dataclass(slots=True)
class Notes:
    """What is worth to know of a check: the aten ops of its graphs, and why it says nothing."""

    ops: list[str] = field(default_factory=list)
    skipped: str = ""


def failure(
    p: Program, way: str = "oracle", device: str = "cpu", notes: Notes | None = None
) -> str:
    """Why a program fails; empty when it passes, or when it fails in torch's own half as well."""
    notes = Notes() if notes is None else notes
    m = analyse(p)
    if m is None:
        notes.skipped = "not a program"
        return ""
    try:
        expected = [_expected(p, k, device) for k in range(1 + bool(p.second))]
    except Exception as e:  # noqa: BLE001  # eager has no gradient for it, say: not a program
        notes.skipped = f"eager: {type(e).__name__}: {e}"
        return ""
    try:
        why = _why(p, m, way, device, expected, notes.ops)
    except Skipped as e:
        notes.skipped = str(e)
        return ""
    if why.startswith((SAVED, BASES)):
        notes.skipped = why
        return ""
    if not why or "aot_eager" in way:
        return why
    if "ops.fuzz" in p.source():  # what follows a custom op has the layout that was told
        try:
            with honest():
                told = [_expected(p, k, device) for k in range(1 + bool(p.second))]
        except RuntimeError as e:  # as_strided beyond the smaller memory
            notes.skipped = f"as told: {e}"
            return ""
        why = _why(p, m, way, device, told, []) and why
    torchs = f"aot_eager {way}" if way in CALLED else "aot_eager"
    if why and (theirs := _why(p, m, torchs, device, expected, [])):
        # Dynamo drops a write to a 0-d f64 with dynamic=True, say: no fault of ours.
        notes.skipped = f"aot_eager: {theirs}"
        return ""
    return why


def _expected(p: Program, second: int, device: str) -> tuple[Any, Any]:
    """What eager gives, and what the program in float64 gives, where it runs in it."""
    want = outcome(p, p.function(), p.arguments(device, second=bool(second)))
    try:
        with defaults_to_double():
            args = p.arguments(device, double=True, second=bool(second))
            return want, outcome(p, p.function(double=True), args)
    except Exception:  # noqa: BLE001  # an op that has no float64
        return want, None


def _told(p: Program, device: str, second: bool) -> list[Outcome]:
    """What a program gives, with custom ops that do as their fake kernels say, and what fakes say.

    The result of a custom op leaves with the strides it has, and what follows it with those told.

    Of a few ops of torch they tell other strides than eager has, as well. They tell nothing of a
    program that looks at a value: a fake tensor has none. The second is what eager gives for
    gradients of the results that are laid as AOTAutograd traces them.
    """
    found = [outcome(p, p.function(), p.arguments(device, second=second))]
    with honest():
        for as_traced in (False, True):
            args = p.arguments(device, second=second)
            found.append(outcome(p, p.function(), args, as_traced))
    args = p.arguments(device, second=second)  # outside of the mode, in which no value is drawn
    with FakeTensorMode() as mode, suppress(*VALUES):
        args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        found.append(outcome(p, p.function(), args))
    return found


def _why(p: Program, m: Any, way: str, device: str, expected: Any, seen: list[str]) -> str:
    options = replace(Options.from_environment({"cache": False}), verify=True, on_error="raise")
    if way not in PLAIN:  # stages are compared for all sizes, and graphs of CPUs taken to a GPU
        options = replace(options, size_facts=False)
    if "graphs" in way:
        options = replace(options, cuda_graphs="on")
    backend: Any = "aot_eager" if "aot_eager" in way else Stages(options, way, seen).backend
    how: dict[str, Any] = {"backend": backend, "dynamic": p.dynamic or None}
    simulation = simulated(p) if way == "graphs" and device == "cpu" else nullcontext()
    given: dict[str, Any] = {}
    try:
        with simulation, TemporaryDirectory() as folder:
            if way == "exported":
                _exported_agrees(p, m, device, expected)
                return ""
            if way == "options":
                given = some_options(p, folder)
            elif way == "warm":
                given = {"cache_dir": folder, "on_error": "raise"}
            how |= {"backend": lenz.backend, "options": given} if given else {}
            for _ in range(1 + (way in WHOLE)):  # the second time from the disk
                torch._dynamo.reset()
                _called(p, m, way, device, expected, how)
            return ""
    except Skipped:
        raise
    except Exception as e:  # noqa: BLE001  # whatever is raised is the finding
        return f"{type(e).__name__}: {e}" + (f"\nwith {given}" if given else "")


def _exported_agrees(p: Program, m: Any, device: str, expected: Any) -> None:
    pairs = exported(p, device, [want for want, _ in expected])
    for (ours, theirs), (want, ideal) in zip(pairs, expected, strict=True):
        alone = replace(want, shared=frozenset())
        try:
            agree(p, m, theirs, alone, ideal)
        except AssertionError as e:
            raise Skipped(f"torch.export: {e}") from e
        agree(p, m, ours, alone, ideal)


def _called(p: Program, m: Any, way: str, device: str, expected: Any, how: dict[str, Any]) -> None:
    """Call the program; raises an error if it differs."""
    if "steps" in way and p.grad:
        count = REPLAYED if "graphs" in way else STEPS
        _steps_agree(p, m, lambda f: torch.compile(f, **how), device, count)
        return
    fn: Callable[..., Any] = torch.compile(p.function(), fullgraph=p.whole, **how)
    if "threads" in way:
        calls = len(expected) * REPLAYED if "graphs" in way else CALLS
        found = threaded(p, fn, len(expected), device, calls)
    else:
        are_many = "graphs" in way or (way in WHOLE and device != "cpu")
        ks = [*range(len(expected))] * (REPLAYED if are_many else 1)
        found = [(k, outcome(p, fn, p.arguments(device, second=bool(k)))) for k in ks]
    for k, got in found:
        want, ideal = expected[k]
        try:
            agree(p, m, got, want, ideal)
        except AssertionError as e:
            if "strides" not in str(e):
                raise
            agree(p, m, got, want, ideal, _told(p, device, bool(k)))


@contextmanager
def simulated(p: Program) -> Iterator[None]:
    """Captures of CUDA graphs are simulated on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch)
        cut_at_random(patch, p.tag)
        yield


def _steps_agree(p: Program, m: Any, compiled: Callable[..., Any], device: str, count: int) -> None:
    want = steps(p, lambda f: f, False, device, count)
    with defaults_to_double():
        ideal = steps(p, lambda f: f, True, device, count)
    unit = max([*m.unit.values(), float(torch.finfo(torch.float32).eps)])
    agree_on_steps(steps(p, compiled, False, device, count), want, ideal, unit)


@contextmanager
def defaults_to_double() -> Iterator[None]:
    """New floats are of float64 in here."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
