"""The GPU time of one call: the only benchmark, used everywhere.

Two events on the tensors' GPU, whichever GPU is current, surround each call. Before the first
event, mutated arguments are restored and the L2 cache is overwritten. Both are queued outside the
timed range, so no copy has to be timed and subtracted, and the host launches the call while the
cache is still being overwritten.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lenz.ir.binary import Binary
from lenz.ir.dtype import BOOL
from lenz.ir.expr import nodes_of
from lenz.ir.kernel import Kernel, exprs_of
from lenz.ir.op import INDEX
from lenz.machine.cuda import driver
from lenz.runtime import executor
from lenz.sym import SymEnv

# Bytes written to flush the L2 cache: 5 times that of an H200, where it takes 60 us. The host needs
# 15 us for two events and a launch.
FLUSH = 256 << 20
SECONDS = 0.02  # limit for all timed calls of one function
FEW, MOST = 5, 100
# A function this many times slower than the best one is timed only FEW times.
HOPELESS = 1.3
SMALL = 128  # integers are random below this, or below the kernel's own limit

Call = Callable[[], Any]


class Gpu:
    """GPU `number`; `api` is torch.cuda or a stand-in, `place` the torch device of its tensors."""

    def __init__(self, number: int, api: Any = torch.cuda, place: str = "") -> None:
        self._number = number
        self._api = api
        self.place = torch.device(place or f"cuda:{number}")
        self.name: str = api.get_device_name(number)
        major, minor = api.get_device_capability(number)
        self.arch: int = 10 * major + minor
        self._scratch: torch.Tensor | None = None

    def current(self) -> Any:
        """Make the GPU current, and restore the previous one afterwards."""
        return self._api.device(self._number)

    def sync(self) -> None:
        """Wait for all work on the GPU."""
        self._api.synchronize(self._number)

    def flush(self) -> None:
        """Queue a write that flushes the L2 cache."""
        if self._scratch is None:
            self._scratch = torch.empty(FLUSH, dtype=torch.uint8, device=self.place)
        self._scratch.zero_()

    def mark(self) -> Any:
        """An event after all work queued on the GPU's current stream."""
        event = self._api.Event(enable_timing=True)
        event.record(self._api.current_stream(self._number))
        return event

    def us(self, start: Any, end: Any) -> float:
        """Microseconds between two completed events."""
        return 1e3 * float(start.elapsed_time(end))

    def now(self) -> float:
        """The host's clock, in seconds."""
        return time.perf_counter()

    def load(self, b: Binary, pointers: int, sizes: int) -> Callable[..., None]:
        """The kernel as a function of the number of programs, the pointers and the sizes.

        Raises RuntimeError if the driver rejects the code, or a call.
        """
        launch = driver.function(b, self._number, pointers, sizes)
        stream = executor.stream(self._number)
        return lambda programs, *args: launch(stream, programs, *args)


def measure(
    call: Call, gpu: Gpu, restore: Call | None = None, seconds: float = SECONDS,
    best: float = math.inf,
) -> float:  # fmt: skip
    """GPU time of one `call` in microseconds, the median of up to MOST calls.

    `restore` undoes the call's mutations and runs before each call. `best` is the time to beat.
    Raises RuntimeError if the call, or an earlier one, fails.
    """
    with gpu.current():
        _times(call, gpu, restore, 2)  # loads the code
        start = gpu.now()
        took = _times(call, gpu, restore, FEW)
        each = (gpu.now() - start) / FEW
        if statistics.median(took) <= HOPELESS * best:
            more = min(MOST - FEW, int(seconds / each) if each > 0 else MOST)
            took += _times(call, gpu, restore, more)
    return statistics.median(took)


def _times(call: Call, gpu: Gpu, restore: Call | None, count: int) -> list[float]:
    marks = []
    for _ in range(count):
        if restore is not None:
            restore()
        gpu.flush()
        start = gpu.mark()
        call()
        marks.append((start, gpu.mark()))
    gpu.sync()
    return [gpu.us(start, end) for start, end in marks]


def example_args(k: Kernel, env: SymEnv, place: torch.device) -> list[torch.Tensor]:
    """Flat tensors for the pointers of a kernel at the example sizes; inputs are random.

    Integers may be indices, so they are random within the range that the kernel checks, or small.
    Raises torch.OutOfMemoryError.
    """
    source = torch.Generator(place).manual_seed(0)
    checks = [e.args[1] for e in nodes_of(*exprs_of(k.body)) if e.op.guarded]
    below = max(1, min([env.hint(n.attrs[0]) for n in checks if n.op is INDEX], default=SMALL))
    made = []
    for p in k.params:
        d, n = p.dtype, env.hint(p.size)
        if p.mode == "work":
            t = torch.zeros(n, dtype=d.torch, device=place)
        elif p.mode == "out":
            t = torch.empty(n, dtype=d.torch, device=place)
        elif d.is_float:
            drawn = torch.float16 if d.bytes == 1 else d.torch
            t = torch.empty(n, dtype=drawn, device=place).normal_(generator=source).to(d.torch)
        else:
            most = 2 if d is BOOL else min(below, (1 << (d.bits - 1)) - 1)
            t = torch.empty(n, dtype=d.torch, device=place).random_(0, most, generator=source)
        made.append(t)
    return made


def restoring(k: Kernel, tensors: Sequence[torch.Tensor]) -> Call | None:
    """A function that restores the arguments that a kernel mutates; None if there are none."""
    pairs = zip(k.params, tensors, strict=True)
    changed = [(p, t) for p, t in pairs if p.mode in ("inout", "work")]
    kept = [(t, t.clone() if p.mode == "inout" else t.new_zeros(())) for p, t in changed]
    if not kept:
        return None

    def restore() -> None:
        for t, old in kept:
            t.copy_(old)

    return restore
