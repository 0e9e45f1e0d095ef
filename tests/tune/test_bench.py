"""The benchmark of one call: what is timed, on which GPU, on what arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lenz.ops  # noqa: F401 - the reader finds ops by name
from lenz.ir.kernel import Kernel
from lenz.ir.reader import read
from lenz.machine.cuda.tune.bench import FEW, FLUSH, MOST, Gpu, example_args, measure, restoring
from lenz.sym import SymEnv, Var
from tests.tune.fake_gpu import FLUSH_US, FakeGpu

CPU = torch.device("cpu")


def test_the_time_is_the_median_of_the_calls_alone() -> None:
    gpu = FakeGpu()
    turns = iter(range(1000))
    us = measure(lambda: gpu.spend(1000.0 if next(turns) % 7 == 0 else 10.0), gpu)
    assert us == 10.0, "the flush, or a slow outlier, is part of the time"


def test_what_restores_the_arguments_is_never_part_of_the_time() -> None:
    gpu = FakeGpu()
    order: list[str] = []

    def restore() -> None:
        order.append("restore")
        gpu.spend(500.0)

    def call() -> None:
        order.append("call")
        gpu.spend(20.0)

    assert measure(call, gpu, restore) == 20.0
    assert order[:4] == ["restore", "call"] * 2
    assert order.count("restore") == order.count("call"), "some run saw what an earlier one left"


def test_the_cache_is_flushed_before_each_call() -> None:
    gpu = FakeGpu()
    measure(lambda: gpu.calls.append("call"), gpu)
    timed = [c for c in gpu.calls if c in ("flush", "mark", "call")]
    assert timed == ["flush", "mark", "call", "mark"] * gpu.count("call")


def test_a_budget_bounds_the_calls() -> None:
    counts = {}
    for us in (1.0, 1000.0, 100_000.0):
        gpu = FakeGpu()
        measure(lambda: (gpu.calls.append("call"), gpu.spend(us)), gpu, seconds=0.02)
        counts[us] = gpu.count("call")
    assert counts[1.0] == 2 + MOST
    assert counts[1000.0] == 2 + FEW + int(20_000 / (1000 + FLUSH_US))
    assert counts[100_000.0] == 2 + FEW, "slower than the budget: no more than the first calls"


def test_what_is_far_from_the_best_is_not_measured_further() -> None:
    gpu = FakeGpu()
    measure(lambda: (gpu.calls.append("call"), gpu.spend(20.0)), gpu, best=10.0)
    assert gpu.count("call") == 2 + FEW


def test_a_failing_call_leaves_the_current_gpu_as_it_was() -> None:
    gpu = FakeGpu()

    def call() -> None:
        raise RuntimeError("too many resources requested for launch")

    with pytest.raises(RuntimeError, match="too many resources"):
        measure(call, gpu)
    assert gpu.calls[0] == "enter" and gpu.calls[-1] == "exit"


class FakeCuda:
    """torch.cuda with two GPUs that notes the number of the device in each call; 0 is current."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.now = 0

    def get_device_name(self, number: int) -> str:
        return f"Fake {number}"

    def get_device_capability(self, number: int) -> tuple[int, int]:
        return (9, 0)

    def device(self, number: int) -> Any:
        cuda = self

        class Current:
            def __enter__(self) -> None:
                self.before, cuda.now = cuda.now, number

            def __exit__(self, *_: object) -> None:
                cuda.now = self.before

        return Current()

    def synchronize(self, number: int) -> None:
        self.seen.append(("synchronize", number))

    def current_stream(self, number: int) -> tuple[str, int]:
        return ("stream", number)

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing

        def record(stream: tuple[str, int]) -> None:
            self.seen.append(("record", stream[1]))
            assert self.now == stream[1], "an event of one GPU while another is current"

        return SimpleNamespace(record=record, elapsed_time=lambda end: 0.25)


def test_everything_happens_on_the_gpu_of_the_tensors() -> None:
    api = FakeCuda()
    gpu = Gpu(1, api, place="cpu")
    current: list[int] = []
    us = measure(lambda: current.append(api.now), gpu, seconds=0.0)
    assert us == 250.0, "0.25 ms"
    assert {number for _, number in api.seen} == {1}, api.seen
    assert ("synchronize", 1) in api.seen and ("record", 1) in api.seen
    assert set(current) == {1} and api.now == 0, "the GPU that was current is not restored"


def test_no_memory_is_taken_before_the_first_flush() -> None:
    gpu = Gpu(0, FakeCuda(), place="cpu")
    assert gpu.name == "Fake 0" and gpu.arch == 90
    assert gpu._scratch is None
    gpu.flush()
    assert gpu._scratch is not None and gpu._scratch.nbytes == FLUSH


def kernel(text: str) -> Kernel:
    k = read(text)
    assert isinstance(k, Kernel)
    return k


COPY = """
kernel @k pointwise (%a: in f32[s0], %b: out f32[3*s0]; s0: 1..) {
  for i in s0 : parallel { store(%b, [3*i], load(%a, [i])) }
}
"""
GATHER = """
kernel @k pointwise (%a: in i8[500], %b: in f32[{n}], %c: out f32[500]) {{
  for i in 512 below 500 : lane {{
    store(%c, [i], load(%b, [@0]; @0: 0..{last} = assert_in_range({index}, index({n}, i64))))
  }}
}}
"""


def gather(n: int) -> Kernel:
    """500 elements of n, at positions that are i8."""
    return kernel(GATHER.format(n=n, last=n - 1, index="cast(load(%a, [i]), i64)"))


STEP = """
kernel @k pointwise (%a: inout f32[64], %b: in bf16[64], %c: inout f32[64], %d: out bool[64]) {
  for i in 64 : lane {
    store(%a, [i], add(load(%a, [i]), cast(load(%b, [i]), f32)))
    store(%c, [i], mul(load(%c, [i]), 2.0:f32))
    store(%d, [i], lt(load(%a, [i]), 0.0:f32))
  }
}
"""


def test_arguments_are_random_at_the_example_sizes() -> None:
    k = kernel(STEP)
    made = example_args(k, SymEnv(), CPU)
    assert [t.dtype for t in made] == [torch.float32, torch.bfloat16, torch.float32, torch.bool]
    assert [t.numel() for t in made] == [64] * 4
    assert len(made[0].unique()) > 60 and len(made[1].unique()) > 40, "zeros run faster than data"
    again = example_args(k, SymEnv(), CPU)
    assert all(torch.equal(x, y) for x, y in zip(made[:3], again[:3], strict=True))


def test_random_numbers_of_the_user_are_not_drawn() -> None:
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    example_args(kernel(STEP), SymEnv(), CPU)
    assert torch.equal(torch.rand(4), want)


def test_a_kernel_without_mutation_copies_nothing() -> None:
    k = gather(7)
    assert restoring(k, [torch.zeros(1)] * 3) is None


def test_mutated_arguments_are_restored_and_others_left_alone() -> None:
    k = kernel(STEP)
    made = example_args(k, SymEnv(), CPU)
    before = [t.clone() for t in made]
    restore = restoring(k, made)
    assert restore is not None
    for t in made:
        t.fill_(1)
    restore()
    assert torch.equal(made[0], before[0]) and torch.equal(made[2], before[2])
    assert bool((made[1] == 1).all()) and bool((made[3] == 1).all())


@pytest.mark.parametrize("n", [1, 5, 100, 100_000])
def test_positions_are_in_the_range_that_the_kernel_checks(n: int) -> None:
    index, data, _ = example_args(gather(n), SymEnv(), CPU)
    assert data.numel() == n
    assert int(index.min()) >= 0 and int(index.max()) < n
    assert int(index.max()) >= min(n, 127) // 2, "all positions are near the first"


def test_sizes_are_those_of_the_example() -> None:
    env = SymEnv().with_var(Var("s0", 1, None), 50)
    a, b = example_args(kernel(COPY), env, CPU)
    assert (a.numel(), b.numel()) == (50, 150)
