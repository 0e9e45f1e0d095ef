"""Compiled CPU kernels on memory that ends, or begins, at a page which may not be touched.

Every buffer of a kernel holds exactly the elements that its parameter declares: a load or a store
that is too wide, or whose mask is wrong, kills the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from lenz.ir.interp import RunKernel
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.machine.cpu import loader
from lenz.machine.cpu.llvm.compile import compile_module, host_target, link
from lenz.machine.cpu.llvm.module import emit_module
from lenz.pipeline import named
from lenz.runtime import threads
from lenz.sym import Var, evaluate
from lenz.target import Target
from tests.codegen.codegen_run import Guarded

__all__ = ["kernel_runner"]


def kernel_runner(s: Schedule, target: Target | None = None) -> RunKernel:
    """Compiles the kernels of a schedule; gives what `interp_schedule` runs them with.

    Each kernel runs on copies behind a forbidden page and on copies before one, and both have to
    give the same.
    """
    target = target or host_target()
    kernels = {show_key(x.kernel): x.kernel for x in named(s).steps if isinstance(x, Launch)}
    text = emit_module(list(kernels.values()), target)
    names = [k.name for k in kernels.values()]
    code = compile_module(text, target)
    library = link(code, names, threads.imports(code))

    def run(k: Kernel, buffers: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        known = kernels[show_key(k)]
        fn = loader.function(library.addresses[known.name], len(k.params), len(k.sizes))
        env: dict[Var, int] = {v: sizes[v.name] for v in k.sizes}
        after: list[dict[str, torch.Tensor]] = []
        for at_end in (True, False):
            memory = {
                p.name: Guarded(buffers[p.name][: evaluate(p.size, env)].contiguous(), at_end)
                for p in k.params
            }
            failed = fn(*[memory[p.name].address for p in k.params], *env.values())
            assert not failed, f"@{k.name} says that a check failed"
            after.append({name: m.tensor() for name, m in memory.items()})
        for p in k.params:
            first, second = after[0][p.name], after[1][p.name]
            if p.mode == "in":
                assert _bits(first).equal(_bits(buffers[p.name][: first.numel()].contiguous()))
                continue
            assert _bits(first).equal(_bits(second)), f"@{k.name}: %{p.name} depends on its place"
            buffers[p.name][: first.numel()].copy_(first)

    return run


def show_key(k: Kernel) -> str:
    """The text of a kernel without its name."""
    from dataclasses import replace

    from lenz.ir.printer import show

    return show(replace(k, name="k"))


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaN equals NaN."""
    raw = (ctypes.c_char * (t.numel() * t.element_size())).from_address(t.data_ptr())
    return torch.frombuffer(bytearray(raw.raw), dtype=torch.uint8) if t.numel() else t.view(-1)
