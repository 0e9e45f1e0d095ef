"""When kernels run: in the order of the program, but for what may come first or last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lenz.ir.graph import Extern
from lenz.ir.kernel import Launch, Schedule
from lenz.schedule.order import RETURNED
from tests.cuda import Fake, cuda_programs
from tests.gpu_oracle import PASSES, gpu_context, lower, schedule

BF16, F32 = torch.bfloat16, torch.float32


def schedules(f: Callable[..., Any], *args: Any) -> list[Schedule]:
    """The schedules of a function for a GPU: forward, and backward if gradients are asked for."""
    cx, found = gpu_context(), list[Schedule]()
    for p in cuda_programs(f, *args):
        g = lower(p, cx)
        for run in PASSES.values():
            g = run(g, cx)
        found.append(schedule(g, cx))
    return found


def steps(s: Schedule) -> list[str]:
    """What runs: `convert` between f32 and bf16, a `loop`, or a call."""
    found = []
    for x in s.steps:
        if isinstance(x, Launch):
            types = {p.dtype.name for p in x.kernel.params}
            found.append("convert" if types == {"f32", "bf16"} else "loop")
        elif isinstance(x, Extern):
            found.append(x.op.split(".")[1])
    return found


def layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Two layers as autocast runs them."""
    return (x @ w.bfloat16()).relu() @ v.t().bfloat16()


def arguments(width: int, grad: bool) -> list[Fake]:
    weights = [Fake(sizes, F32, grad=grad) for sizes in ((width, width), (width // 2, width))]
    return [Fake((64, width), BF16, grad=grad), *weights]


def test_small_weights_are_converted_first_and_their_gradients_last() -> None:
    forward, backward = (steps(s) for s in schedules(layers, *arguments(256, grad=True)))
    ours = forward.count("convert")
    assert ours and forward[:ours] == ["convert"] * ours and "convert" not in forward[ours:]
    ours = backward.count("convert")
    assert ours and backward[-ours:] == ["convert"] * ours


def test_large_weights_are_converted_where_they_are_read() -> None:
    assert 4096 * 2048 * BF16.itemsize > RETURNED
    forward, _ = schedules(layers, *arguments(4096, grad=True))
    assert steps(forward) == ["convert", "mm", "loop", "convert", "mm"]


def test_weights_that_are_not_returned_are_converted_where_they_are_read() -> None:
    """All of them at once would take memory."""
    (inference,) = schedules(layers, *arguments(256, grad=False))
    assert steps(inference) == ["convert", "mm", "loop", "convert", "mm"]


def test_what_is_smaller_than_its_operands_stays_in_its_place() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (x @ w).float(), (x @ w.t()).float().sum(1), (x @ w[:, :128]).relu() @ w[:128]

    (s,) = schedules(f, Fake((64, 256), BF16), Fake((256, 256), BF16))
    assert steps(s) == ["mm", "mm", "convert", "mm", "loop", "mm", "convert"]
