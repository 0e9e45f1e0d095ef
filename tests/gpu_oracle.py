"""GPU kernels checked without a GPU: compiled to cubins, and run by Triton's interpreter.

`on_gpu(g)` is a graph as it would be for CUDA tensors. `interpreted` runs one kernel of its
schedule on CPU memory; `assert_triton` compares a whole schedule with the graph, and `cubins`
compiles it.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from oracle import assert_results, random_constants, random_inputs

from lenz.codegen.triton.compile import compile_text
from lenz.codegen.triton.kernel import emit
from lenz.context import Context
from lenz.ir.binary import Binary
from lenz.ir.graph import Extern, Graph, Pointwise, Reduction, View
from lenz.ir.interp import interp
from lenz.ir.interp_schedule import interp_schedule
from lenz.ir.kernel import Kernel, Launch, Schedule, programs
from lenz.ir.printer import show
from lenz.ir.tensor import Buffer
from lenz.ir.verify import verify
from lenz.opt import PASSES
from lenz.options import Options
from lenz.schedule import schedule
from lenz.sym import Var, evaluate
from lenz.target import Target

CUDA = Target("cuda", "sm_90", lanes=32)
_COUNT = itertools.count()


def gpu_context() -> Context:
    """The context of a compilation for a GPU that is not there."""
    return Context(Options(verify=True), CUDA)


def on_gpu(g: Graph) -> Graph:
    """The graph with every tensor on cuda:0."""

    def there(b: Any) -> Any:
        if not isinstance(b, Buffer):
            return b
        return replace(b, type=replace(b.type, device="cuda:0"))

    nodes: list[Any] = []
    for n in g.nodes:
        if isinstance(n, (Pointwise, Reduction, View)):
            nodes.append(replace(n, out=there(n.out)))
        elif isinstance(n, Extern):
            nodes.append(replace(n, outs=tuple(there(o) for o in n.outs)))
    return replace(
        g,
        inputs=tuple(there(b) for b in g.inputs),
        constants=tuple(there(b) for b in g.constants),
        nodes=tuple(nodes),
    )


def scheduled(g: Graph) -> Schedule:
    """The schedule of a graph for a GPU, every stage of it verified."""
    cx = gpu_context()
    for run in PASSES.values():
        g = run(g, cx)
        verify(g)
    s = schedule(g, cx)
    verify(s)
    return s


def kernels_of(s: Schedule) -> list[Kernel]:
    """The kernels of a schedule, each with a name of its own."""
    found = [x.kernel for x in s.steps if isinstance(x, Launch)]
    return [replace(k, name=f"{k.name}_{n}") for n, k in enumerate(found)]


def cubins(s: Schedule, arch: int = 90) -> list[Binary]:
    """Every kernel of a schedule, compiled."""
    pytest.importorskip("triton")
    return [compile_text(emit(k), arch) for k in kernels_of(s)]


@cache
def _interpreted(text: str, name: str) -> Any:
    import triton

    place = f"<interpreted {next(_COUNT)}>"
    linecache.cache[place] = (len(text), None, text.splitlines(True), place)
    module: dict[str, Any] = {"__name__": place}
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        exec(compile(text, place, "exec"), module)
    return module[name]


def interpreted(k: Kernel, buffers: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
    """Run a kernel by Triton's interpreter; arguments as for `interp_kernel`."""
    import triton

    made = emit(k)
    values: dict[Var, int] = {v: sizes[v.name] for v in k.sizes}
    count = evaluate(programs(k), values)
    if count == 0:
        return
    args: list[Any] = []
    for p in k.params:
        t = buffers[p.name]
        if t.numel() == 0:
            t = torch.zeros(1, dtype=t.dtype)
        args.append(t.view(torch.int8) if t.dtype is torch.bool else t)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        _interpreted(made.text, made.name)[(count,)](*args, *values.values())


def assert_triton(g: Graph, seeds: Iterable[int] = (0,)) -> Schedule:
    """Assert that the Triton text of a graph's schedule, interpreted, does what the graph does."""
    pytest.importorskip("triton")
    s = scheduled(on_gpu(g))
    for seed in seeds:
        inputs, constants = random_inputs(g, seed), random_constants(g, seed)
        want = interp(g, inputs, constants)
        got = interp_schedule(s, _copies(inputs), constants, run_kernel=interpreted)
        texts = "\n".join(emit(k).text for k in kernels_of(s))
        assert_results(got, want, f"the kernels differ from their graph\n{show(s)}\n{texts}")
    return s


def _copies(inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor | int]:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]


