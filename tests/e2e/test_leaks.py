"""What is compiled and dropped again leaves nothing of lenz, and no more memory than `aot_eager`.

`make leaks` (leaks.py) does 1,000 cycles and 10^6 calls, which takes an hour.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections import Counter

import pytest

from lenz.ir import interned
from tests.e2e import leaks
from tests.e2e.leaks import cycle


def left() -> Counter[str]:
    """How many objects of lenz and of LLVM live, by their class, and interned expressions."""
    gc.collect()
    interned.release()  # what the last cycle left there depends on its sizes
    gc.collect()  # a variable that knows itself as its only one is dropped by this alone
    kinds = [type(o) for o in gc.get_objects()]
    own = [f"{k.__module__}.{k.__qualname__}" for k in kinds]
    found = Counter(k for k in own if k.startswith(("lenz", "llvmlite")))
    found["interned"] = interned.entries()
    return found


def test_no_object_of_lenz_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest keeps the records of torch's log, and with them what they tell of.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    for k in range(2):
        cycle(k)
    before = left()
    for k in range(2, 6):
        cycle(k)
    assert not {k: n for k, n in (left() - before).items() if n > 1}


LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@LINUX
@pytest.mark.rest
@pytest.mark.parametrize(("kind", "count"), [("calls", 6_000), ("raising", 1_000)])
def test_calls_leave_nothing(kind: str, count: int) -> None:
    """Resident memory, open files and memory maps stay as they are."""
    looks = leaks.apart(kind, count, "cpu")
    assert len(looks) >= leaks.LOOKS and not leaks.faults(leaks.growth(looks)), looks


@LINUX
def test_what_grows_is_found() -> None:
    flat = {"resident KiB": 5e5, "files": 4.0, "maps": 450.0, "GPU KiB": 10.0}
    for kind, each in {"resident KiB": 256.0, "files": 0.1, "maps": 1.0, "GPU KiB": 0.5}.items():
        looks = [{**flat, kind: flat[kind] + each * k} for k in range(leaks.LOOKS)]
        (fault,) = leaks.faults(leaks.growth(looks))
        assert fault.startswith(f"{kind} grew"), fault
    assert not leaks.faults(leaks.growth([flat] * leaks.LOOKS))
    grown = {**leaks.growth([flat] * leaks.LOOKS), "resident KiB": 5_000.0}
    assert leaks.faults(grown, usual=1_000.0) and not leaks.faults(grown, usual=4_000.0)
