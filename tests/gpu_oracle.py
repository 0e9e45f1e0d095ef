"""GPU kernels checked without a GPU: compiled to cubins, and run by Triton's interpreter.

`on_gpu(g)` is a graph with all of its tensors on a GPU, `lowered_there` lowers a program for one,
and `scheduled` is the schedule, also with other tiles than the usual ones. `interpreted` runs one
kernel of it on CPU memory; `assert_triton` compares a whole schedule with the graph, and `cubins`
compiles it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree

from lenz.context import Context
from lenz.frontend import FxProgram
from lenz.frontend.build import build
from lenz.ir.binary import Binary
from lenz.ir.graph import LOOPS, Extern, Graph, View
from lenz.ir.interp import interp, interp_schedule
from lenz.ir.kernel import Kernel, Launch, Schedule, programs
from lenz.ir.printer import show
from lenz.ir.tensor import Buffer
from lenz.ir.verify import verify
from lenz.lower import lower, native_ops
from lenz.machine.cuda.shape import Shape
from lenz.machine.cuda.triton.compile import compile_text
from lenz.machine.cuda.triton.kernel import emit
from lenz.opt import PASSES
from lenz.options import Options
from lenz.pipeline import named
from lenz.schedule import schedule
from lenz.schedule.beside import share_launches
from lenz.sym import Var, evaluate
from lenz.target import Target
from tests.oracle import assert_results, random_constants, random_inputs

CUDA = Target("cuda", "sm_90", lanes=32)
# Tiles of few lanes: a row of 9 is already one that does not fit, and has a loop with a tail.
TINY = Shape(tile=16, edge=8, row=8, chunk=8, rows=16, panel=8, narrow=4, part=16, group=4)


def gpu_context(emulate_rounding: bool = False) -> Context:
    """The context of a compilation for a GPU that is not there."""
    return Context(Options(verify=True, emulate_rounding=emulate_rounding), CUDA)


def on_gpu(g: Graph) -> Graph:
    """The graph with every tensor on cuda:0."""

    def there(b: Any) -> Any:
        if not isinstance(b, Buffer):
            return b
        return replace(b, type=replace(b.type, device="cuda:0"))

    nodes: list[Any] = []
    for n in g.nodes:
        if isinstance(n, (*LOOPS, View)):
            nodes.append(replace(n, out=there(n.out)))
        elif isinstance(n, Extern):
            nodes.append(replace(n, outs=tuple(there(o) for o in n.outs)))
    return replace(
        g,
        inputs=tuple(there(b) for b in g.inputs),
        constants=tuple(there(b) for b in g.constants),
        nodes=tuple(nodes),
    )


def lowered_there(p: FxProgram) -> Graph:
    """The graph of a program of the CPU, lowered as if all of its tensors were on cuda:0.

    Its fake tensors are on the CPU again afterwards: the backward half is traced with some.
    """
    mode = FakeTensorMode()
    constants = {name: mode.from_tensor(x) for name, x in p.constants.items()}
    leaves = _pytree.tree_leaves([constants, [n.meta.get("val") for n in p.gm.graph.nodes]])
    fakes = {id(x): x for x in leaves if isinstance(x, FakeTensor)}
    before = {k: x.fake_device for k, x in fakes.items()}
    try:
        for x in fakes.values():
            x.fake_device = torch.device("cuda:0")
        g = lower(replace(p, constants=constants), gpu_context())
    finally:
        for k, x in fakes.items():
            x.fake_device = before[k]
    verify(g)
    return g


def scheduled(
    g: Graph, tiles: Shape | None = None, split: bool = True, emulate_rounding: bool = False
) -> Schedule:
    """The schedule of a graph for a GPU, every stage of it verified.

    `tiles` replaces the usual ones; without `split` long reductions stay in one kernel.
    """
    cx = gpu_context(emulate_rounding)
    for name, run in PASSES.items():
        if split or name != "split_reduce":
            g = run(g, cx)
            verify(g)
    s = schedule(g, cx, None if tiles is None else lambda *_: (tiles,))
    steps = [
        replace(x, kernel=x.candidates[-1], candidates=())
        if isinstance(x, Launch) and x.candidates
        else x
        for x in s.steps
    ]
    s = replace(s, steps=tuple(steps))
    verify(s)
    return s


def joined(s: Schedule) -> Schedule:
    """The schedule with short kernels side by side, verified."""
    few = share_launches(named(s), gpu_context())
    verify(few)
    return few


def kernels_of(s: Schedule) -> list[Kernel]:
    """The kernels of a schedule, each with a name of its own."""
    found = [x.kernel for x in s.steps if isinstance(x, Launch)]
    return [replace(k, name=f"{k.name}_{n}") for n, k in enumerate(found)]


def kinds_of(s: Schedule) -> list[str]:
    """What kinds of kernels a schedule launches, in order."""
    return [k.kind for k in kernels_of(s)]


def texts_of(s: Schedule) -> list[str]:
    """The Triton texts of a schedule, in order."""
    return [emit(k).text for k in kernels_of(s)]


def cubins(s: Schedule, arch: int = 90) -> list[Binary]:
    """Every kernel of a schedule, compiled."""
    pytest.importorskip("triton")
    return [compile_text(emit(k), arch) for k in kernels_of(s)]


def interpreted(k: Kernel, buffers: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
    """Run a kernel by Triton's interpreter, which watches memory; arguments as `interp_kernel`."""
    from tests.triton_interpreter import Argument, launch

    values: dict[Var, int] = {v: sizes[v.name] for v in k.sizes}
    arguments = []
    for p in k.params:
        t = buffers[p.name]
        n = evaluate(p.size, values)
        assert t.dim() == 1 and t.numel() >= n and t.dtype is p.dtype.torch, p
        scatters = k.kind == "scatter"
        given = (p.mode != "out", p.mode != "in", scatters, p.mode == "work")
        arguments.append(Argument(p.name, t[:n], *given))
    launch(emit(k), arguments, list(values.values()), evaluate(programs(k), values))


def assert_triton(
    g: Graph,
    seeds: Iterable[int] = (0,),
    given: Sequence[torch.Tensor | int] | None = None,
    tiles: Shape | None = None,
    split: bool = True,
) -> Schedule:
    """Assert that the Triton text of a graph's schedule, interpreted, does what the graph does.

    The inputs are random, or those that are `given`; the rest as for `scheduled`.
    """
    s = scheduled(on_gpu(g), tiles, split)
    seeds = tuple(seeds)
    assert_kernels(s, g, seeds, given)
    # Joining does not depend on tiles or numbers: once is enough.
    if tiles is None and len((few := joined(s)).steps) < len(s.steps):
        assert_kernels(few, g, seeds[:1], given)
    return s


def assert_kernels(
    s: Schedule,
    g: Graph,
    seeds: Iterable[int] = (0,),
    given: Sequence[torch.Tensor | int] | None = None,
) -> None:
    """Assert that the Triton text of a schedule, interpreted, does what a graph does."""
    pytest.importorskip("triton")
    for seed in seeds:
        inputs = random_inputs(g, seed) if given is None else given
        constants = random_constants(g, seed)
        want = interp(g, _copies(inputs), constants)
        message = "the kernels differ from their graph\n" + "\n".join([show(s), *texts_of(s)])
        try:
            got = interp_schedule(s, _copies(inputs), constants, run_kernel=interpreted)
        except Exception as e:
            e.args = (f"{e}\n{message}",)
            raise
        assert_results(got, want, message)


def assert_function(fn: Callable[..., Any], *inputs: Any, **options: Any) -> Schedule:
    """`assert_triton` for what a function of tensors is lowered to, on the very inputs.

    With `dynamic=True` its sizes are symbolic; other options are those of `assert_triton`.
    """
    from tests.lower.harness import trace

    gm = trace(fn, inputs, options.pop("dynamic", False))
    g = lowered_there(build(gm, [], "inference", "test", native=native_ops()))
    return assert_triton(g, given=options.pop("given", inputs), **options)


def _copies(inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor | int]:
    """Clones with the same strides; what lies between the elements of a tensor is cloned too."""
    found: list[torch.Tensor | int] = []
    for x in inputs:
        if isinstance(x, torch.Tensor):
            memory = x.new_empty(0).set_(x.untyped_storage()).clone()
            x = memory.as_strided(x.shape, x.stride(), x.storage_offset())
        found.append(x)
    return found
