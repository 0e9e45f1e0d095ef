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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

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
    known = {name: _address(x, name) for x in _torch_libraries() for name in names}
    return {**_imports(), **{name: address for name, address in known.items() if address}}


def in_thread(made: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in a thread. LLVM does not hold the GIL, so Python goes on meanwhile."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(made, *args)
    pool.shutdown(wait=False)
    return future


@cache
def _imports() -> Mapping[str, int]:
    found: dict[str, int] = {}
    for library in _c_libraries():
        for name in (*MEMORY, *LIBM, *[n + "f" for n in LIBM]):
            if name not in found and (address := _address(library, name)):
                found[name] = address
    for library in _torch_libraries():
        if address := _address(library, "torch_parallel_for"):
            found["torch_parallel_for"] = address
            break
    else:
        found["torch_parallel_for"] = ctypes.cast(_serial_loop(), ctypes.c_void_p).value or 0
    return found


def _c_libraries() -> Iterator[ctypes.CDLL]:
    if sys.platform == "win32":
        yield ctypes.CDLL("ucrtbase")
        yield ctypes.CDLL("msvcrt")
        return
    yield ctypes.CDLL(None)  # Python itself is linked with libm
    if sys.platform == "linux":
        yield ctypes.CDLL("libm.so.6")


@cache  # kept forever, because compiled code holds its address
def _serial_loop() -> Any:
    body = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, i64, i64, i64, pointer, pointer)

    def run(begin: int, end: int, _: int, function: int, context: int) -> int:
        body(function)(begin, end, context)
        return 0

    return kind(run)


@cache
def _torch_libraries() -> list[ctypes.CDLL]:
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    names = ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll")
    paths = [os.path.join(folder, name) for name in names]
    return [ctypes.CDLL(path) for path in paths if os.path.exists(path)]


def _address(library: ctypes.CDLL, name: str) -> int:
    try:
        function = getattr(library, name)
    except AttributeError:
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
