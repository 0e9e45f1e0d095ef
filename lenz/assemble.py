"""Kernels to functions that a plan can call: emit, compile or find in the store, load."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from lenz.context import Context
from lenz.errors import Missing
from lenz.ir.binary import Binary
from lenz.ir.kernel import Kernel
from lenz.machine.cpu import loader
from lenz.machine.cpu.llvm.compile import Library, compile_module, link
from lenz.machine.cpu.llvm.module import emit_module
from lenz.machine.cuda import driver
from lenz.machine.cuda.triton.kernel import emit
from lenz.machine.cuda.triton.pool import Failed, compile_all, keys_of
from lenz.runtime.store import Store, store_in
from lenz.runtime.threads import imports

OLDEST = 80  # compute capability 8.0, the first with bf16


class Refused(Exception):
    """Kernels that did not compile. The graph is recompiled with their ops, `origins`, in eager."""

    def __init__(self, failed: Sequence[tuple[Kernel, Failed]]) -> None:
        super().__init__(failed[0][1].message)
        self.failed = failed
        self.origins: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Code:
    """The compiled kernels of one graph.

    `text` is everything that was emitted, `object` the CPU's machine code, `binaries` those of
    GPUs. `functions` are the kernels by name, valid as long as `library` lives. `keys` are the
    store's keys of GPU kernels, and of the object under the name "".
    """

    text: str
    object: bytes = b""
    binaries: tuple[Binary, ...] = ()
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    library: Library | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


def check_gpus(devices: Sequence[str]) -> None:
    """Raise Missing, with the reason, if lenz cannot make kernels for a device."""
    for device in devices:
        if device.startswith("cuda") and arch(device) < OLDEST:
            name = torch.cuda.get_device_name(torch.device(device).index or 0)
            raise Missing(
                f"{name} has a compute capability below 8.0, which lenz needs",
                hint='on_error="eager", the default, runs such graphs in eager',
            )


def assemble(kernels: Mapping[str, tuple[Kernel, str]], cx: Context) -> Callable[[], Code]:
    """Compile kernels, given by name and device; returns a function that loads them.

    GPU kernels compile in the background until the caller calls the function. It raises Refused
    with the kernels that the GPU's compiler or driver rejects.
    """
    store = store_in(cx.options)
    host = [k for k, device in kernels.values() if device == "cpu"]
    gpus = dict.fromkeys(device for _, device in kernels.values() if device != "cpu")
    there = {gpu: [k for k, device in kernels.values() if device == gpu] for gpu in gpus}
    with cx.trace.stage("emit"):
        texts = {gpu: [emit(k, arch(gpu)) for k in mine] for gpu, mine in there.items()}
    beside = ThreadPoolExecutor(1)  # this thread waits for another process
    begun = {gpu: beside.submit(compile_all, t, arch(gpu), store) for gpu, t in texts.items()}
    text, obj, library, key = _host(host, store, cx)
    functions: dict[str, Callable[..., Any]] = {
        k.name: loader.function(library.addresses[k.name], len(k.params), len(k.sizes))
        for k in host
        if library is not None
    }

    def finish() -> Code:
        binaries: list[Binary] = []
        keys = {"": key}
        for gpu, mine in there.items():
            with cx.trace.stage("triton"):
                made = begun[gpu].result()
            with cx.trace.stage("load"):
                binaries += _loaded(mine, made, torch.device(gpu).index or 0, functions)
            keys |= zip((k.name for k in mine), keys_of(texts[gpu], arch(gpu)), strict=True)
        all_texts = [text] * bool(text) + [t.text for made in texts.values() for t in made]
        return Code("\n".join(all_texts), obj, tuple(binaries), functions, library, keys)

    return finish


def _loaded(
    kernels: Sequence[Kernel],
    made: Sequence[Binary | Failed],
    number: int,
    functions: dict[str, Callable[..., Any]],
) -> list[Binary]:
    """Load the compiled kernels of a GPU into `functions`; raises Refused."""
    failed = [(k, b) for k, b in zip(kernels, made, strict=True) if isinstance(b, Failed)]
    if failed:
        raise Refused(failed)
    binaries = [b for b in made if isinstance(b, Binary)]
    for k, b in zip(kernels, binaries, strict=True):
        try:
            functions[k.name] = driver.function(b, number, len(k.params), len(k.sizes))
        except RuntimeError as e:  # more shared memory than this card has, say
            failed.append((k, Failed(k.name, str(e))))
    if failed:
        raise Refused(failed)
    return binaries


def _host(
    kernels: Sequence[Kernel], store: Store | None, cx: Context
) -> tuple[str, bytes, Library | None, str]:
    """One LLVM module for the CPU's kernels, and the store's key of its object."""
    if not kernels:
        return "", b"", None, ""
    text = emit_module(kernels, cx.target)
    key = hashlib.sha256(f"{cx.target.key()}\n{text}".encode()).hexdigest()
    obj = store.get("object", key) if store is not None else None
    if obj is None:
        with cx.trace.stage("llvm"):
            obj = compile_module(text, cx.target)
        if store is not None:
            store.put("object", key, obj)
    names = [k.name for k in kernels]
    with cx.trace.stage("link"):
        library = link(obj, names, imports())
    return text, obj, library, key


def arch(device: str) -> int:
    """The architecture for which a GPU's kernels are compiled: 90 for sm_90."""
    return driver.capability(torch.device(device).index or 0)
