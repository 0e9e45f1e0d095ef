"""When modules of GPUs are unloaded, with a driver that only notes its calls."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lenz.ir.binary import Binary
from lenz.machine.cuda import driver
from lenz.machine.cuda.driver import Launcher, OwnStream
from lenz.machines import Library, host
from lenz.plan.native_link import DECLARED, _helpers, _object

BINARY = Binary("kernel", b"code", 4, 0, 2, 32, 0)


class Driver:
    """Notes what it is asked for; handles of kernels are those of their modules plus 1,000."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.loaded: set[int] = set()
        self.made = 0
        self.is_capturing = False
        self.refuses_shared = False

    def cuModuleLoadData(self, to: Any, code: bytes) -> int:
        self.made += 1
        self.loaded.add(self.made)
        self.did.append(f"load {self.made}")
        to._obj.value = self.made
        return 0

    def cuModuleGetFunction(self, to: Any, module: Any, name: bytes) -> int:
        to._obj.value = 1000 + module.value
        return 0

    def cuFuncSetAttribute(self, *given: Any) -> int:
        return int(self.refuses_shared)

    def cuGetErrorString(self, status: int, to: Any) -> int:
        return 0

    def cuModuleUnload(self, module: Any) -> int:
        self.did.append(f"unload {module.value}")
        self.loaded.remove(module.value)  # a KeyError if it is unloaded twice
        return 0

    def cuLaunchKernelEx(self, start: int, handle: int, table: int, extra: int) -> int:
        assert handle - 1000 in self.loaded, f"kernel {handle} is launched after its module went"
        self.did.append(f"launch {handle - 1000}")
        return 0


def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver in place of libcuda, and the calls of torch that load kernels."""
    made = Driver()
    monkeypatch.setattr(driver, "library", lambda: made)
    torch_cuda: dict[str, Callable[..., Any]] = {
        "device": lambda number: nullcontext(),
        "current_stream": lambda number: SimpleNamespace(query=lambda: True),
        "synchronize": lambda number: made.did.append("synchronize"),
        "is_current_stream_capturing": lambda: made.is_capturing,
    }
    for name, function in torch_cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    driver.unused.cache_clear()
    return made


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return fake(monkeypatch)


def loaded(shared: int = 0) -> Launcher:
    binary = Binary("kernel", b"code", 4, shared, 2, 32, 0)
    return driver.function(binary, 0, 1, 0)


def test_a_module_goes_before_the_next_one_is_loaded(cuda: Driver) -> None:
    first, second = loaded(), loaded()
    first(0, 1, 8)
    del first
    gc.collect()
    assert cuda.did == ["load 1", "load 2", "launch 1"], "work of the kernel may still be queued"
    third = loaded()
    assert cuda.did[3:] == ["synchronize", "unload 1", "load 3"]
    second(0, 1, 8), third(0, 1, 8)
    fourth = loaded()
    assert cuda.did[8:] == ["load 4"], "nothing is waited for where nothing is unloaded"
    assert cuda.loaded == {2, 3, 4}
    del fourth


def test_of_many_modules_those_of_living_kernels_stay(cuda: Driver) -> None:
    kept: list[Launcher] = []
    for k in range(200):
        made = loaded()
        made(0, 1, 8)
        if k % 50 == 0:
            kept.append(made)
    del made
    kept.append(loaded())
    assert cuda.loaded == {1, 51, 101, 151, 201}
    for launch in kept:
        launch(0, 1, 8)


def test_what_others_capture_stays_for_good(cuda: Driver) -> None:
    captured, held, plain = loaded(), loaded(), loaded()
    cuda.is_capturing = True
    captured(0, 1, 8)
    held(OwnStream(0), 1, 8)  # the graph that is captured holds the kernel
    plain(0, 0, 8)  # no programs: no launch
    cuda.is_capturing = False
    captured(0, 1, 8)
    del captured, held, plain
    last = loaded()
    assert cuda.loaded == {1, 4}
    del last


def test_a_kernel_that_the_driver_refuses_is_unloaded(cuda: Driver) -> None:
    cuda.refuses_shared = True
    with pytest.raises(RuntimeError, match="shared memory"):
        loaded(shared=1 << 20)
    cuda.refuses_shared = False
    last = loaded()
    assert cuda.loaded == {2}
    del last


def test_each_module_is_unloaded_once_by_threads_that_load(cuda: Driver) -> None:
    made = [loaded() for _ in range(100)]
    found: list[Launcher] = []
    begin = threading.Barrier(4)

    def work() -> None:
        begin.wait(60)
        found.append(loaded())

    made.clear()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(found) == 4 and cuda.loaded == {101, 102, 103, 104}


def test_modules_wait_while_another_thread_captures(
    cuda: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(number: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    first = [loaded(), loaded()]
    first.clear()
    with monkeypatch.context() as other:
        other.setattr(torch.cuda, "synchronize", refused)
        second = loaded()
    assert cuda.loaded == {1, 2, 3}
    third = loaded()
    assert cuda.loaded == {3, 4}
    del second, third


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_calls_no_driver(cuda: Driver) -> None:
    made = [loaded() for _ in range(3)]
    before = list(cuda.did)
    if (child := os.fork()) == 0:  # pragma: no cover - another process
        made.clear()
        gc.collect()
        os._exit(0 if cuda.did == before else 1)
    assert os.waitpid(child, 0)[1] == 0, "the driver was called"
    for launch in made:
        launch(0, 1, 8)


SCRIPT = """
import sys
import pytest
from tests.runtime.test_modules import fake, loaded
patch = pytest.MonkeyPatch()
cuda = fake(patch)
cuda.cuModuleUnload = lambda module: print("unloaded", file=sys.stderr)
kept = [loaded() for _ in range(3)]
kept.pop()
print("end")
"""


@pytest.mark.slow
def test_the_end_of_the_process_calls_no_driver() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("end\n", "")


def linked_with(own: dict[str, Any], *names: str) -> Library:
    """The helpers of native code for GPUs, with `own` functions of Python in place of others."""
    text = _helpers(True)
    unused = ctypes.CFUNCTYPE(ctypes.c_int32)(lambda: 1)
    given = dict.fromkeys((m[1] for m in DECLARED.finditer(text)), address(unused))
    given = {n: at for n, at in given.items() if not n.startswith("llvm")}
    return host().link(
        _object(text, 2, None), names, given | {n: address(f) for n, f in own.items()}
    )


def address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@pytest.mark.parametrize("current", (None, 5))
def test_native_code_gives_a_new_thread_its_context(current: int | None) -> None:
    """The runtime's ExchangeDevice sets none if the device is the thread's already."""
    done: list[tuple[str, int]] = []

    def writes(name: str, value: int | None) -> Any:
        def call(to: Any, given: int) -> int:
            done.append((name, given if name != "get" else 0))
            to[0] = value
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int32)(
            call
        )

    def number(to: Any, given: int) -> int:
        done.append(("device", given))
        to[0] = 40 + given
        return 0

    def take(context: int) -> int:
        done.append(("set", context))
        return 0

    own = {
        "_ZN3c104cuda14ExchangeDeviceEa": ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_int8)(
            lambda n: 2
        ),
        "cuCtxGetCurrent": writes("get", current),
        "cuDeviceGet": ctypes.CFUNCTYPE(
            ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32
        )(number),
        "cuDevicePrimaryCtxRetain": writes("retain", 9),
        "cuCtxSetCurrent": ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(take),
    }
    library = linked_with(own, "exchange")
    exchange = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(library.addresses["exchange"])
    assert exchange(1) == 2
    new = [("device", 1), ("retain", 41), ("set", 9)]
    assert done == [("get", 0), *(new if current is None else [])]


def test_native_code_gives_the_callers_gpu_no_context() -> None:
    """MaybeExchangeDevice makes none for a GPU that the program does not use."""
    restored: list[int] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_int8)
    own = {"_ZN3c104cuda19MaybeExchangeDeviceEa": kind(lambda n: restored.append(n) or 1)}
    library = linked_with(own, "restore")
    ctypes.CFUNCTYPE(None, ctypes.c_int32)(library.addresses["restore"])(3)
    assert restored == [3]


@pytest.mark.parametrize("is_capturing", (False, True))
def test_native_code_notes_what_is_captured(is_capturing: bool) -> None:
    """The helpers of native code for GPUs, with functions of Python in place of the driver's."""
    asked = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))
    launched = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 4)
    kernels: list[int] = []

    def capturing(stream: int, to: Any) -> int:
        to[0] = is_capturing
        return 0

    def launch(config: int, kernel: int, table: int, extra: int) -> int:
        kernels.append(kernel)
        return 0

    own = {"cuStreamIsCapturing": asked(capturing), "cuLaunchKernelEx": launched(launch)}
    library = linked_with(own, "captured", "launch")
    status = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(library.addresses["captured"])
    kinds = [ctypes.c_void_p] * 2 + [ctypes.c_int64, ctypes.c_void_p] + [ctypes.c_int64] * 2
    run = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(library.addresses["launch"])

    made = driver._launcher(SimpleNamespace(cuLaunchKernelEx=launch), 7, BINARY, 1, 0)
    values = (ctypes.c_int64 * 1)(8)
    assert run(ctypes.addressof(made.record), 0, 1, ctypes.addressof(values), 1, status(0)) == 0
    assert kernels == [7]
    assert any(made.record[driver.CAPTURED]) is is_capturing
    assert len(made.record) == driver.CAPTURED.stop
