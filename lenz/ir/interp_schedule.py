"""The oracle for schedules: kernels, calls and views in order, on real memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lenz.errors import InternalError
from lenz.ir.graph import atom_refs, buffers_of
from lenz.ir.interp import Call, Interpreted, Run, outcome_of
from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.tensor import Buffer
from lenz.sym import Sym, substitute

RunKernel = Callable[[Kernel, Mapping[str, torch.Tensor], Mapping[str, int]], None]


def interp_schedule(
    s: Schedule,
    inputs: Sequence[torch.Tensor | int],
    constants: Sequence[torch.Tensor] = (),
    call: Call | None = None,
    objects: Mapping[str, Any] | None = None,
    run_kernel: RunKernel = interp_kernel,
) -> Interpreted:
    """Run a schedule; arguments as in `interp`. Mutations of inputs are stores of its kernels.

    `run_kernel` replaces the interpreter of kernels, to test other ways to run them.

    Raises InternalError like `interp_kernel`, and for an output that no step defines.
    """
    g = s.graph
    run = Run(g, call, objects or {})
    run.bind(inputs, constants)
    buffers = buffers_of(g)
    for step in s.steps:
        if isinstance(step, Launch):
            _launch(step, run, buffers, run_kernel)
        else:
            run.node(step)
    missing = [r for r in atom_refs(g.outputs) if r not in run.tensors]
    if missing:
        raise InternalError(f"no step defines the output %{missing[0]}", rule="output-defined")
    return outcome_of(run, inputs)


def _launch(step: Launch, run: Run, buffers: Mapping[str, Buffer], run_kernel: RunKernel) -> None:
    k = step.kernel
    memory: dict[str, torch.Tensor] = {}
    # The sizes of a kernel may have bounds that the graph's lack.
    scope = run.g.env.scope()
    plain = {v: scope.get(v.name, v) for v in k.sizes}

    def size(s: Sym) -> int:
        return run.size(substitute(s, plain))

    for p, name in zip(k.params, step.args, strict=True):
        if p.mode == "work":
            memory[p.name] = torch.zeros(size(p.size), dtype=p.dtype.torch)
            continue
        if name not in run.tensors:
            if p.mode != "out":
                raise InternalError(f"@{k.name} reads %{name}, which no step defines")
            run.allocate(buffers[name])
        t = run.tensors[name]
        if not t.numel():  # the formula of its length assumes nonempty dimensions
            memory[p.name] = t.new_empty(max(0, size(p.size)))
            continue
        base = run.base[name]
        total = t.untyped_storage().nbytes() // t.element_size() - base
        memory[p.name] = t.as_strided((total,), (1,), base)
    run_kernel(k, memory, {v.name: size(v) for v in k.sizes})
