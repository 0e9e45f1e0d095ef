"""A compile server without Triton: the text of a kernel is Python, which is run instead."""

from __future__ import annotations

import lenz.machine.cuda.triton.worker
from lenz.ir.binary import Binary
from lenz.machine.cuda.triton.compile import KernelText

CODE = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from tests.codegen.stub_compiler import main; main(int(sys.argv[1]))"
)


def kernel(name: str, text: str = "") -> KernelText:
    return KernelText(name, text, (), (), 4, 1, False)


def binary(k: KernelText) -> Binary:
    return Binary(k.name, b"code", k.warps, 0, 0, 0, 0)


def compile_text(k: KernelText, arch: int) -> Binary:
    if k.name != "warm":
        exec(k.text, {})
    return binary(k)


def main(parent: int) -> None:
    """Serve as the worker's `main` does; reports every half a second make silence short."""
    lenz.machine.cuda.triton.worker.POLL_SECONDS = 0.5  # type: ignore[misc]
    lenz.machine.cuda.triton.worker.compile_text = compile_text  # type: ignore[attr-defined]
    lenz.machine.cuda.triton.worker.main(parent)
