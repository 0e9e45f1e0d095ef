"""Launches on GPUs from several threads, with a driver that only looks at what it is given."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from lenz.ir.binary import Binary
from lenz.machine.cuda import driver
from lenz.machine.cuda.driver import Launcher, _launcher

THREADS, POINTERS, SIZES = 8, 3, 2
STREAM_AT = 32  # bytes before the stream in CUlaunchConfig
BINARY = Binary("kernel", b"code", 4, 0, 2, 32, 0)

Driver = Callable[[int, int, int, int], int]


@pytest.fixture(autouse=True)
def nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def launcher(driver: Driver) -> Launcher:
    return _launcher(SimpleNamespace(cuLaunchKernelEx=driver), 1, BINARY, POINTERS, SIZES)


def given(start: int, table: int) -> list[int]:
    """What a launch says: programs, stream, pointers and sizes, and the two null pointers."""
    programs = ctypes.c_uint32.from_address(start).value
    stream = ctypes.c_uint64.from_address(start + STREAM_AT).value
    places = (ctypes.c_uint64 * (POINTERS + SIZES + BINARY.extra)).from_address(table)
    return [programs, stream, *(ctypes.c_uint64.from_address(p).value for p in places)]


def wanted(tag: int) -> list[int]:
    return [tag, tag, *[tag] * (POINTERS + SIZES), 0, 0]


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, THREADS + 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()


def test_launches_under_way_at_once_keep_their_arguments() -> None:
    """The driver looks at a launch only when all threads have packed theirs."""
    meet, seen = threading.Barrier(THREADS), list[list[int]]()

    def driver(start: int, handle: int, table: int, extra: int) -> int:
        meet.wait(60)
        seen.append(given(start, table))
        meet.wait(60)
        return 0

    launch = launcher(driver)
    for _ in range(3):
        seen.clear()
        run(lambda k: launch(k, k, *[k] * (POINTERS + SIZES)))
        assert sorted(seen) == [wanted(k) for k in range(1, THREADS + 1)]


def test_many_launches_from_threads_keep_their_arguments(quick_switches: None) -> None:
    bad = list[list[int]]()

    def driver(start: int, handle: int, table: int, extra: int) -> int:
        if (found := given(start, table)) != wanted(found[0]):
            bad.append(found)
        return 0

    launch = launcher(driver)

    def work(k: int) -> None:
        for n in range(500):
            tag = 1000 * k + n
            launch(tag, tag, *[tag] * (POINTERS + SIZES))

    run(work)
    assert not bad, f"{len(bad)} launches carry values of others: {bad[:3]}"


def test_a_launch_inside_of_a_launch_keeps_both() -> None:
    """A signal's handler, or a finalizer, may launch the same kernel in the same thread."""
    seen = list[list[int]]()

    def driver(start: int, handle: int, table: int, extra: int) -> int:
        if not seen:
            seen.append([])
            launch(2, 2, *[2] * (POINTERS + SIZES))
        seen.append(given(start, table))
        return 0

    launch = launcher(driver)
    launch(1, 1, *[1] * (POINTERS + SIZES))
    assert seen[1:] == [wanted(2), wanted(1)]


def test_wrong_arguments_leave_the_next_launch_whole() -> None:
    seen = list[list[int]]()
    launch = launcher(lambda start, handle, table, extra: seen.append(given(start, table)) or 0)
    with pytest.raises(struct.error):
        launch(1, 1, 1)
    launch(2, 2, *[2] * (POINTERS + SIZES))
    launch(3, 0, *[3] * (POINTERS + SIZES))
    assert seen == [wanted(2)], "a launch of no programs is none"


@pytest.mark.parametrize(("status", "kind"), [(1, RuntimeError), (2, torch.OutOfMemoryError)])
def test_a_launch_without_memory_raises_the_error_that_programs_catch(
    status: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    strings = SimpleNamespace(cuGetErrorString=lambda status, text: 0)
    monkeypatch.setattr(driver, "library", lambda: strings)
    with pytest.raises(RuntimeError, match=f"launching kernel: CUDA error {status}") as e:
        launcher(lambda *_: status)(1, 1, *[1] * (POINTERS + SIZES))
    assert e.type is kind
