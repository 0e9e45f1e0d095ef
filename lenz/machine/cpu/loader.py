"""Compiled CPU kernels: one linked object for all of them, with callables at their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

from lenz.machine.cpu.llvm.compile import link
from lenz.machines import Counts, Functions, Loader, register
from lenz.runtime.threads import imports


def function(address: int, pointers: int, sizes: int) -> Callable[..., int]:
    """A callable for the kernel at `address`: `pointers` data pointers, then `sizes` integers.

    It returns the code of a failed check, or 0. Arguments are plain ints; any other type raises
    ctypes.ArgumentError. The call releases the GIL. The holder of the callable must keep the linked
    library alive.
    """
    given = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes
    return ctypes.CFUNCTYPE(ctypes.c_int64, *given)(address)


def load(pieces: Mapping[str, bytes], kernels: Counts, device: str) -> tuple[Functions, object]:
    """Link the object; the functions live as long as the library."""
    code = pieces[""]
    library = link(code, list(kernels), imports(code))
    return {n: function(library.addresses[n], *c) for n, c in kernels.items()}, library


# The description of the CPU is part of every key (`Context.target`).
LOADER = Loader("object", lambda kernels: {"": "kernels.o"}, load, str, str, lambda: None)
register("cpu", LOADER)
