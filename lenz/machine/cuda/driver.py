"""Run compiled kernels on NVIDIA GPUs through the CUDA driver.

Nothing is compiled here: the driver (libcuda) takes a cubin and launches it. A launch packs its
arguments and its geometry into one block of memory and makes one call, `cuLaunchKernelEx`. The
layout is that of CUlaunchConfig in the CUDA driver API (12.0 and later).

The module of a kernel that nobody holds any more is unloaded before the next one is loaded. Garbage
collection itself calls no driver: it may come while work of the kernel is queued, while a stream is
captured, in a forked process, or after CUDA has ended. A kernel that was captured into a graph of
somebody else stays loaded for good, because nothing tells when that graph is dropped.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections import deque
from contextlib import suppress
from functools import cache
from typing import Any, Protocol, cast
from weakref import finalize

import torch

from lenz.errors import InternalError, Missing
from lenz.ir.binary import Binary

# CUlaunchConfig: gridDim x y z, blockDim x y z, sharedMemBytes, stream, attributes, their number.
CONFIG = "7I4xQQI4x"
CONFIG_BYTES = struct.calcsize("=" + CONFIG)
CAPTURED = slice(CONFIG_BYTES + 8, CONFIG_BYTES + 16)  # of a record: whether a graph has the kernel
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY; a kernel whose registers spill takes memory too
FREE_SHARED = 48 << 10  # bytes of shared memory that a kernel may use without asking


class OwnStream(int):
    """A stream that is captured into a graph which holds the kernels that it launches."""


class Launcher(Protocol):
    """Launches one kernel: (stream, programs, pointers.., sizes..) -> None.

    Native code launches by its `record`: the configuration, the kernel's handle in 8 bytes, and 8
    bytes that are not 0 once it was captured into a graph that does not hold it.
    """

    record: Any

    def __call__(self, stream: int, programs: int, *args: int) -> None: ...


@cache
def library() -> Any:
    """The driver's library. Its calls keep the GIL, because they only queue work."""
    try:
        library = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as e:
        raise Missing(f"the CUDA driver is missing ({e})", hint="install NVIDIA's driver") from e
    if not hasattr(library, "cuLaunchKernelEx"):
        raise Missing("the CUDA driver is older than 12.0", hint="install a newer one")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


def check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        error = torch.OutOfMemoryError if status == OUT_OF_MEMORY else RuntimeError
        raise error(f"{what}: {(text.value or b'CUDA error %d' % status).decode()}")


def capability(number: int) -> int:
    """The architecture of a GPU: 90 for compute capability 9.0."""
    major, minor = torch.cuda.get_device_capability(number)
    return 10 * major + minor


def function(b: Binary, number: int, pointers: int, sizes: int) -> Launcher:
    """A callable for one kernel on GPU `number`.

    Raises RuntimeError with the driver's message if the driver rejects the code or a launch. Errors
    inside a kernel surface later, as with every CUDA kernel.
    """
    driver = library()
    with torch.cuda.device(number):
        torch.cuda.current_stream(number).query()  # creates the device's context
        unload(number)
        module, handle = load_function(b.code, b.name)
        made = _launcher(driver, handle, b, pointers, sizes)
        finalize(made, unused(number).append, (module, made.record)).atexit = False
        if b.shared > FREE_SHARED:
            told = ctypes.c_void_p(handle), MAX_DYNAMIC_SHARED, b.shared
            check(driver.cuFuncSetAttribute(*told), f"{b.shared} bytes of shared memory: {b.name}")
    return made


@cache
def capture_lock() -> threading.Lock:
    """Held during a capture: no other thread may capture, wait for the GPU, or draw for a graph."""
    return threading.Lock()


@cache
def unused(number: int) -> deque[tuple[int, Any]]:
    """Modules of a GPU whose kernels nobody holds, and the records of these kernels."""
    return deque()


def unload(number: int) -> None:
    """Unload the unused modules of the current GPU, after all work that was queued."""
    waiting = unused(number)
    # Nobody can wait for the GPU while the user captures a stream: the next load tries again. After
    # any other error of the driver, the load itself fails and says so.
    with suppress(RuntimeError), capture_lock():
        if ready := len(waiting):
            torch.cuda.synchronize(number)
        for _ in range(ready):
            module, record = waiting.popleft()
            if not any(record[CAPTURED]):
                check(library().cuModuleUnload(ctypes.c_void_p(module)), "unloading a kernel")


def load_function(code: bytes, name: str) -> tuple[int, int]:
    """The module of a cubin or of PTX text on the current GPU, and the handle of its kernel."""
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    check(library().cuModuleLoadData(ctypes.byref(module), code), f"loading {name}")
    found = library().cuModuleGetFunction(ctypes.byref(handle), module, name.encode())
    check(found, f"finding {name}")
    return module.value or 0, handle.value or 0


def _block(values: int) -> tuple[Any, int, int]:
    """Memory for a launch, its address, and the address of its table of argument addresses.

    The block holds the configuration, then 8 bytes per argument (a 32-bit size is the lower half),
    then the table.
    """
    block = ctypes.create_string_buffer(CONFIG_BYTES + 16 * values)
    start = ctypes.addressof(block)
    first = start + CONFIG_BYTES
    for n in range(values):
        struct.pack_into("=Q", block, CONFIG_BYTES + 8 * (values + n), first + 8 * n)
    return block, start, first + 8 * values


def _launcher(driver: Any, handle: int, b: Binary, pointers: int, sizes: int) -> Launcher:
    if not handle:
        raise InternalError(f"{b.name} has no address", pass_name="runtime")
    values = pointers + sizes + b.extra
    pack = struct.Struct(f"={CONFIG}{pointers}Q{sizes}q").pack_into
    call, threads, shared = driver.cuLaunchKernelEx, b.threads, b.shared
    captures = torch.cuda.is_current_stream_capturing
    # A launch owns its block until the driver has copied it: between packing and the call another
    # thread or a signal handler may run. Taking and returning a block costs 0.06 us.
    blocks = [_block(values)]
    take, give = blocks.pop, blocks.append

    def launch(stream: int, programs: int, *args: int) -> None:
        if programs == 0:
            return
        try:
            mine = take()
        except IndexError:  # every block is in use
            mine = _block(values)
        if captures() and not isinstance(stream, OwnStream):
            record[CAPTURED] = [b"\1"] * 8
        block, start, table = mine
        pack(block, 0, programs, 1, 1, threads, 1, 1, shared, stream, 0, 0, *args)
        status = call(start, handle, table, 0)
        give(mine)
        if status:
            check(status, f"launching {b.name}")

    record = ctypes.create_string_buffer(CAPTURED.stop)
    struct.pack_into(f"={CONFIG}Q", record, 0, 0, 1, 1, threads, 1, 1, shared, 0, 0, 0, handle)
    launch.record = record  # type: ignore[attr-defined]  # functions may have any
    return cast("Launcher", launch)
