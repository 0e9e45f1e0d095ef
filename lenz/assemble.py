"""Kernels to functions that a plan can call: emitted, compiled or found in the store, loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from lenz.codegen.llvm.compile import Library, compile_module, link
from lenz.codegen.llvm.module import emit_module
from lenz.codegen.triton.kernel import emit
from lenz.codegen.triton.pool import Failed, compile_all, keys_of
from lenz.context import Context
from lenz.errors import Missing
from lenz.ir.binary import Binary
from lenz.ir.kernel import Kernel
from lenz.runtime import cuda, loader
from lenz.runtime.store import Store, store_in
from lenz.runtime.threads import imports

OLDEST = 80  # compute capability 8.0, the first with bf16


class Refused(Exception):
    """Kernels that did not compile; the graph is made again with their ops, `origins`, in eager."""

    def __init__(self, failed: Sequence[tuple[Kernel, Failed]]) -> None:
        super().__init__(failed[0][1].message)
        self.failed = failed
        self.origins: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Code:
    """The compiled kernels of one graph.

    `text` is all that was emitted, `object` the machine code for the CPU, `binaries` that for GPUs;
    `functions` are the kernels by name, valid for as long as `library` lives; `keys` the store's
    keys of GPU kernels, and of the object under the name "".
    """

    text: str
    object: bytes = b""
    binaries: tuple[Binary, ...] = ()
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    library: Library | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


def check_gpus(devices: Sequence[str]) -> None:
    """Raise Missing, which says what is missing, if lenz cannot make kernels for a device."""
    for device in devices:
        if device.startswith("cuda") and arch(device) < OLDEST:
            name = torch.cuda.get_device_name(torch.device(device).index or 0)
            raise Missing(
                f"{name} has a compute capability below 8.0, which lenz needs",
                hint='on_error="eager", the default, runs such graphs without lenz',
            )


def assemble(kernels: Mapping[str, tuple[Kernel, str]], cx: Context) -> Callable[[], Code]:
    """Compile kernels, given by name with the device each is launched on; what it gives loads them.

    Those for GPUs are compiled beside what the caller does before it calls that, which then raises
    Refused with those that the GPU's compiler or driver does not take.
    """
    store = store_in(cx.options)
    host = [k for k, device in kernels.values() if device == "cpu"]
    gpus = dict.fromkeys(device for _, device in kernels.values() if device != "cpu")
    there = {gpu: [k for k, device in kernels.values() if device == gpu] for gpu in gpus}
    with cx.trace.stage("emit"):
        texts = {gpu: [emit(k, arch(gpu)) for k in mine] for gpu, mine in there.items()}
    beside = ThreadPoolExecutor(1)  # it waits for another process
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
    """Load what was made of kernels on a GPU into `functions`; raises Refused."""
    failed = [(k, b) for k, b in zip(kernels, made, strict=True) if isinstance(b, Failed)]
    if failed:
        raise Refused(failed)
    binaries = [b for b in made if isinstance(b, Binary)]
    for k, b in zip(kernels, binaries, strict=True):
        try:
            functions[k.name] = cuda.function(b, number, len(k.params), len(k.sizes))
        except RuntimeError as e:  # more shared memory than this card has, say
            failed.append((k, Failed(k.name, str(e))))
    if failed:
        raise Refused(failed)
    return binaries


def _host(
    kernels: Sequence[Kernel], store: Store | None, cx: Context
) -> tuple[str, bytes, Library | None, str]:
    """One module of LLVM for the kernels of the CPU, and the store's key of its object."""
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
    """The architecture that kernels of a GPU are compiled for: 90 for sm_90."""
    return cuda.capability(torch.device(device).index or 0)
