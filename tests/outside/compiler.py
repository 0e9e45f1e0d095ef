"""The device for lenz: a machine for the compiler, and a loader for what it made.

The code of a kernel is its text, and an interpreter runs it on the device's memory. Entry points of
the groups `lenz.machines` and `lenz.loaders` name this file; nothing in lenz knows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lenz.ops  # noqa: F401 - fills the table of ops that the reader looks in
from lenz.context import Context
from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import Kernel
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.machines import Code, Counts, Functions, Loader, machine_of, register
from lenz.runtime.store import store_in
from lenz.sym import evaluate
from tests.outside.device import NAME, at


def function(text: str) -> Callable[..., int]:
    """A kernel as a callable of pointers, then sizes; it returns the code of a failed check."""
    k: Any = read(text)

    def run(*args: int) -> int:
        sizes = dict(zip(k.sizes, args[len(k.params) :], strict=True))
        memory = {
            p.name: at(address, evaluate(p.size, sizes), p.dtype.torch)
            for p, address in zip(k.params, args, strict=False)
        }
        interp_kernel(k, memory, {v.name: n for v, n in sizes.items()})
        return 0  # the interpreter raises by itself

    return run


def compile(kernels: Sequence[Kernel], device: str, cx: Context) -> Callable[[], Code]:
    """Emit and load kernels. The code of one is its text."""
    texts = {k.name: show(k).encode() for k in kernels}
    keys = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
    store = store_in(cx.options)
    for name, text in texts.items():
        if store is not None:
            store.put(LOADER.kind, keys[name], text)
    files = {LOADER.files([name])[name]: text for name, text in texts.items()}
    return lambda: Code("", files, {device: keys}, load(texts, {}, device)[0])


def load(pieces: Mapping[str, bytes], counts: Counts, device: str) -> tuple[Functions, object]:
    """The functions of kernels, which may also come from the disk cache."""
    return {name: function(text.decode()) for name, text in pieces.items()}, None


VERSION = "1"  # part of every key
LOADER = Loader(
    kind="npu",
    files=lambda names: {name: f"{name}.npu" for name in names},
    load=load,
    key=lambda device: VERSION,
    fits=lambda device: VERSION,
    start=lambda: None,
)
# Kernels have the loops of a CPU's, and are joined as these are.
register(NAME, replace(machine_of("cpu"), compile=compile))
register(NAME, LOADER)
