"""NVIDIA GPUs as a machine for the compiler: programs of a grid, Triton text, cubins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from lenz.context import Context
from lenz.errors import Missing, UserError
from lenz.ir.binary import encode
from lenz.ir.kernel import Kernel
from lenz.machine.cuda import driver
from lenz.machine.cuda.capabilities import CAN
from lenz.machine.cuda.loader import LOADER
from lenz.machine.cuda.schedule import forms, loss
from lenz.machine.cuda.triton.kernel import emit
from lenz.machine.cuda.triton.pool import Failed, compile_all, keys_of
from lenz.machine.cuda.tune.search import tune
from lenz.machines import Code, Elsewhere, Machine, Refused, register
from lenz.runtime.store import store_in

OLDEST = 80  # compute capability 8.0, the first with bf16


def compile(kernels: Sequence[Kernel], device: str, cx: Context) -> Callable[[], Code]:
    """Compile in another process, for which the returned function waits."""
    number = torch.device(device).index or 0
    arch = driver.capability(number)
    if arch < OLDEST:
        what = f"{torch.cuda.get_device_name(number)} has a compute capability below 8.0"
        hint = 'on_error="eager", the default, runs such graphs in eager'
        raise Missing(f"{what}, which lenz needs", hint=hint)
    with cx.trace.stage("emit"):
        texts = [emit(k, arch) for k in kernels]
    store, tell = store_in(cx.options), cx.trace.kernels
    begun = ThreadPoolExecutor(1).submit(compile_all, texts, arch, store, tell)

    def finish() -> Code:
        with cx.trace.stage("triton"):
            made = begun.result()
        failed = {b.name: b.message for b in made if isinstance(b, Failed)}
        pieces = {b.name: encode(b) for b in made if not isinstance(b, Failed)}
        functions: dict[str, Callable[..., Any]] = {}
        with cx.trace.stage("load"):
            for k in kernels if not failed else ():
                try:
                    counts = {k.name: (len(k.params), len(k.sizes))}
                    functions |= LOADER.load(pieces, counts, device)[0]
                except RuntimeError as e:  # more shared memory than this card has, say
                    failed[k.name] = str(e)
        if failed:
            raise Refused(failed)
        files = {LOADER.files([name])[name]: code for name, code in pieces.items()}
        keys = {device: dict(zip(pieces, keys_of(texts, arch), strict=True))}
        return Code("\n".join(t.text for t in texts), files, keys, functions)

    return finish


def elsewhere(kernels: Sequence[Kernel], capability: str, cx: Context) -> Elsewhere:
    """Compile for GPUs that may be absent, of a compute capability such as "8.0"."""
    major, _, minor = capability.partition(".")
    if not (f"{major}{minor}".isdecimal() and len(minor) == 1 and int(major + minor) >= OLDEST):
        hint = 'write it as "8.0", which is the oldest'
        raise UserError(f"there is no code for compute capability {capability!r}", hint=hint)
    arch = int(major + minor)
    texts = [emit(k, arch) for k in kernels]
    pieces: dict[str, tuple[str, bytes]] = {}
    made = compile_all(texts, arch, store_in(cx.options))
    for key, piece in zip(keys_of(texts, arch), made, strict=True):
        if isinstance(piece, Failed):
            told = f"{piece.name} does not compile for compute capability {capability}"
            raise UserError(f"{told}: {piece.message}")
        pieces[piece.name] = key, encode(piece)
    return f"compute capability {capability}", pieces


register("cuda", Machine(CAN, forms, loss, tune, compile, elsewhere))
