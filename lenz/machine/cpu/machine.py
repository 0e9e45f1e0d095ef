"""CPUs as a machine for the compiler: loops and vectors, LLVM text, code in the process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from lenz.context import Context
from lenz.ir.kernel import Kernel
from lenz.machine.cpu.capabilities import CAN
from lenz.machine.cpu.llvm.compile import compile_module
from lenz.machine.cpu.llvm.module import emit_module
from lenz.machine.cpu.loader import LOADER
from lenz.machine.cpu.schedule import forms, loss
from lenz.machines import Code, Machine, register
from lenz.runtime.store import cached, store_in
from lenz.runtime.threads import in_thread


def compile(kernels: Sequence[Kernel], device: str, cx: Context) -> Callable[[], Code]:
    """One LLVM module for all kernels."""
    store, trace = store_in(cx.options), cx.trace
    text = emit_module(kernels, cx.target)
    key = hashlib.sha256(f"{cx.target.key()}\n{text}".encode()).hexdigest()
    trace.kernels(0, len(kernels))  # LLVM takes them at once
    obj_of = in_thread(cached, store, LOADER.kind, key, lambda: compile_module(text, cx.target))

    def finish() -> Code:
        with trace.stage("llvm"):
            obj = obj_of.result()
        trace.kernels(len(kernels), len(kernels))
        counts = {k.name: (len(k.params), len(k.sizes)) for k in kernels}
        with trace.stage("link"):
            functions, library = LOADER.load({"": obj}, counts, device)
        (file,) = LOADER.files(counts).values()
        return Code(text, {file: obj}, {device: {"": key}}, functions, (library,))

    return finish


register("cpu", Machine(CAN, forms, loss, lambda s, store: (s, ()), compile))
