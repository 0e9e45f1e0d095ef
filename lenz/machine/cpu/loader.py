"""Addresses of compiled kernels as Python callables."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def _prototype(pointers: int, sizes: int) -> Any:
    return ctypes.CFUNCTYPE(
        ctypes.c_int64, *([ctypes.c_void_p] * pointers), *([ctypes.c_int64] * sizes)
    )


def function(address: int, pointers: int, sizes: int) -> Callable[..., int]:
    """A callable for the kernel at `address`: `pointers` data pointers, then `sizes` integers.

    It returns the code of a failed check, or 0. Arguments are plain ints; any other type raises
    ctypes.ArgumentError. The call releases the GIL. The holder of the callable must keep the linked
    library alive.
    """
    made: Callable[..., int] = _prototype(pointers, sizes)(address)
    return made
