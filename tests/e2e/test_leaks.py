"""What is compiled and dropped again leaves nothing of lenz, and no more memory than `aot_eager`.

`make leaks` runs all 300 cycles of the second test, which takes minutes.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lenz.ir import interned
from tests.arch.source import REPOSITORY

WIDTH = 16


def step(x: Tensor, w: Tensor) -> Tensor:
    y = F.layer_norm(F.gelu(x @ w), (WIDTH,)).softmax(-1)
    return (y * 2 + x.sum(-1, keepdim=True)).relu().square().mean()


def cycle(k: int, backend: str = "lenz") -> None:
    """Compile a training step for sizes of its own, run it, and forget it."""
    x, w = torch.randn(8 + k, 24 + 3 * k), torch.randn(24 + 3 * k, WIDTH, requires_grad=True)
    torch.compile(step, backend=backend, dynamic=False)(x, w).backward()
    torch._dynamo.reset()


def left() -> Counter[str]:
    """How many objects of lenz and of LLVM live, by their class, and interned expressions."""
    gc.collect()
    interned.release()  # what the last cycle left there depends on its sizes
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
    for k in range(2, 5):
        cycle(k)
    assert not {k: n for k, n in (left() - before).items() if n > 1}


GROWTH = """
import gc
from tests.e2e.test_leaks import cycle
points = []
for k in range({cycles}):
    cycle(k, {backend!r})
    gc.collect()
    with open("/proc/self/statm") as file:
        points.append(int(file.read().split()[1]) * 4)
late = list(enumerate(points))[len(points) // 3 :]
k0, kib0 = (sum(column) / len(late) for column in zip(*late))
print(sum((k - k0) * (v - kib0) for k, v in late) / sum((k - k0) ** 2 for k, _ in late))
"""


def growth(backend: str, cycles: int) -> float:
    """KiB a cycle that the memory of a process grows by, after its first third."""
    command = [sys.executable, "-c", GROWTH.format(backend=backend, cycles=cycles)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_grows_as_that_of_aot_eager(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--all-cycles"):
        pytest.skip("minutes: make leaks")
    ours, theirs = (growth(backend, 300) for backend in ("lenz", "aot_eager"))
    print(f"KiB a cycle: lenz {ours:.1f}, aot_eager {theirs:.1f}")
    assert ours <= 1.3 * theirs
