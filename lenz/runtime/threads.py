"""Addresses of C functions that kernels call: torch's thread pool, libm, Sleef, memory functions.

Kernels run in parallel through `torch_parallel_for` of libtorch's C shim (torch 2.10 and later), so
they share the pool and the thread count of eager ops. If no torch library exports it, kernels run
on the calling thread.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

TORCH = ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll")  # Linux, macOS, Windows
MEMORY = ("memcpy", "memmove", "memset")
# Every C math function that an op may call. Each has an f32 form with the suffix f.
LIBM = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "cos", "cosh",
    "erf", "erfc", "exp", "exp2", "expm1", "fdim", "floor", "fma", "fmax", "fmin", "fmod", "hypot",
    "ldexp", "lgamma", "log", "log10", "log1p", "log2", "nearbyint", "nextafter", "pow",
    "remainder", "rint", "round", "roundeven", "sin", "sinh", "sqrt", "tan", "tanh", "tgamma",
    "trunc",
)  # fmt: skip


def imports(code: bytes = b"") -> dict[str, int]:
    """Name -> address of every function that compiled kernels may call.

    Of Sleef's functions, only those that `code`, an object, names and libtorch exports.
    """
    names = {name.decode() for name in re.findall(rb"Sleef_\w+", code)}
    return {**_imports(), **addresses_in(torch_libraries(*TORCH), names)}


def in_thread(made: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in a thread. LLVM does not hold the GIL, so Python goes on meanwhile."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(made, *args)
    pool.shutdown(wait=False)
    return future


@cache
def _imports() -> Mapping[str, int]:
    found = addresses_in(_c_libraries(), (*MEMORY, *LIBM, *[n + "f" for n in LIBM]))
    loop = addresses_in(torch_libraries(*TORCH), ["torch_parallel_for"])
    return found | (loop or {"torch_parallel_for": address_of(_serial_loop())})


def _c_libraries() -> list[ctypes.CDLL]:
    # None is Python itself, which is linked with libm.
    names = {"win32": ("ucrtbase", "msvcrt"), "linux": (None, "libm.so.6")}
    return [ctypes.CDLL(name) for name in names.get(sys.platform, (None,))]


@cache  # kept forever, because compiled code holds its address
def _serial_loop() -> Any:
    body = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    i64, pointer = ctypes.c_int64, ctypes.c_void_p

    def run(begin: int, end: int, _: int, function: int, context: int) -> int:
        body(function)(begin, end, context)
        return 0

    return ctypes.CFUNCTYPE(ctypes.c_int32, i64, i64, i64, pointer, pointer)(run)


@cache
def torch_libraries(*files: str) -> list[ctypes.CDLL]:
    """Those of torch's libraries that exist, by the names of their files."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    paths = [os.path.join(folder, file) for file in files]
    return [ctypes.CDLL(path) for path in paths if os.path.exists(path)]


def addresses_in(libraries: Iterable[Any], names: Iterable[str]) -> dict[str, int]:
    """The addresses of these functions, without those that no library has."""
    homes = {n: next((x for x in libraries if hasattr(x, n)), None) for n in names}
    return {n: address_of(getattr(x, n)) for n, x in homes.items() if x is not None}


def address_of(function: Any) -> int:
    """The address of a function of ctypes."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
