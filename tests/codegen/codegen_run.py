"""Compile a kernel, run it on buffers that end at a page that may not be touched, and compare it
with the interpreter."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence

import torch

from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import Kernel
from lenz.machine.cpu import loader
from lenz.machine.cpu.llvm.compile import compile_module, host_target, link
from lenz.machine.cpu.llvm.module import emit_module
from lenz.runtime import threads
from lenz.sym import Sym, evaluate
from lenz.target import Target

PAGE = mmap.PAGESIZE
HASWELL = (
    "+avx,+avx2,+bmi,+bmi2,+cmov,+cx16,+cx8,+f16c,+fma,+fxsr,+lzcnt,+mmx,+movbe,+popcnt,+sahf,+sse,"
    "+sse2,+sse3,+sse4.1,+sse4.2,+ssse3,+xsave"
)


def targets() -> dict[str, Target]:
    """The machine we are on, and on x86 the code for older ones that it can run as well."""
    host = host_target()
    found = {"host": host}
    if host.triple.startswith("x86_64"):
        if host.has("avx2"):
            found["avx2"] = Target("cpu", host.triple, "haswell", HASWELL, 8, host.version)
        found["sse2"] = Target(
            "cpu", host.triple, "x86-64", "+sse,+sse2,+cx8,+fxsr,+mmx", 4, host.version
        )
    return found


_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """Memory of a tensor, flush against a forbidden page after it (or before it)."""

    def __init__(self, t: torch.Tensor, at_end: bool) -> None:
        size = t.numel() * t.element_size()
        pages = -(-max(size, 1) // PAGE)
        self.map = mmap.mmap(-1, (pages + 2) * PAGE)
        whole = (ctypes.c_char * ((pages + 2) * PAGE)).from_buffer(self.map)
        base = ctypes.addressof(whole)
        assert base % PAGE == 0
        for forbidden in (base, base + (pages + 1) * PAGE):
            assert (
                _mprotect(forbidden, PAGE, mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0) == 0
            )
        self.address = base + PAGE + (pages * PAGE - size if at_end else 0)
        self.like, self.size, self._whole = t, size, whole
        ctypes.memmove(self.address, t.data_ptr(), size)

    def tensor(self) -> torch.Tensor:
        """A copy of what the memory holds."""
        out = torch.empty_like(self.like)
        ctypes.memmove(out.data_ptr(), self.address, self.size)
        return out


# What kernels are compiled for; the fixture `target` sets it.
current: list[Target] = []


def compiled(kernels: Sequence[Kernel], target: Target | None = None):  # type: ignore[no-untyped-def]
    """(callables by name, library) of the kernels."""
    target = target or (current[-1] if current else host_target())
    text = emit_module(kernels, target)
    code = compile_module(text, target)
    library = link(code, [k.name for k in kernels], threads.imports(code))
    return {
        k.name: loader.function(library.addresses[k.name], len(k.params), len(k.sizes))
        for k in kernels
    }, library


def run(
    k: Kernel,
    buffers: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    target: Target | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Run the kernel on guarded copies of flat buffers: with the guard after them, and before."""
    functions, library = compiled([k], target)
    results = []
    for at_end in (True, False):
        memory = {p.name: Guarded(buffers[p.name], at_end) for p in k.params}
        functions[k.name](
            *[memory[p.name].address for p in k.params], *[sizes[v.name] for v in k.sizes]
        )
        results.append({name: m.tensor() for name, m in memory.items()})
    del library
    return results


def check(
    k: Kernel,
    inputs: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    target: Target | None = None,
) -> dict[str, torch.Tensor]:
    """Run compiled and interpreted on the same buffers; gives what the compiled kernel made.

    `inputs` are flat; buffers that are not given are made full of ones. Buffers hold exactly the
    elements that the parameter declares, so that one element more is a fault.
    """
    sizes = sizes or {}
    env = {v: sizes[v.name] for v in k.sizes}

    def elements(s: Sym) -> int:
        return evaluate(s, env)

    buffers = {}
    for p in k.params:
        given = inputs.get(p.name)
        buffers[p.name] = (
            torch.ones(elements(p.size), dtype=p.dtype.torch) if given is None else given.clone()
        )
        assert buffers[p.name].numel() == elements(p.size), p.name
    wanted = {name: t.clone() for name, t in buffers.items()}
    interp_kernel(k, wanted, sizes)
    for result in run(k, buffers, sizes, target):
        for name, t in wanted.items():
            torch.testing.assert_close(result[name], t, rtol=rtol, atol=atol, equal_nan=True)
    return result
