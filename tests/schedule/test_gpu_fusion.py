"""Which kernels a program becomes on a GPU: a launch and a trip to memory more is what costs there.

Programs are traced twice: with the sizes of a benchmark, where the schedule is read, and with small
ones, where Triton's interpreter runs it against the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lenz.ir.kernel import Schedule, programs
from lenz.ir.printer import show
from lenz.sym import Int
from tests.gpu_oracle import assert_triton, kernels_of, on_gpu, scheduled
from tests.lower.harness import lowered

BF16 = torch.bfloat16
Shape = tuple[int, ...]


def tensors(shapes: tuple[Shape, ...], dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.empty(s, dtype=dtype) for s in shapes]


def schedule_of(fn: Callable[..., Any], *shapes: Shape, dtype: torch.dtype = BF16) -> Schedule:
    """The schedule of a function of tensors with these shapes."""
    return scheduled(on_gpu(lowered(fn, tensors(shapes, dtype))))


def assert_kernels(s: Schedule, count: int) -> None:
    names = [k.name for k in kernels_of(s)]
    assert len(names) == count, f"{names}\n{show(s)}"


def rms_rotary(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    q = (h.to(x.dtype) * w).view(*x.shape[:-1], -1, cos.shape[-1])
    a, b = q.chunk(2, -1)
    return q * cos + torch.cat([-b, a], -1) * sin


def concat_pad(a: Tensor, b: Tensor) -> Tensor:
    return F.pad(torch.cat([a, b], -1), (64, 128))


def causal_softmax(x: Tensor) -> Tensor:
    n = x.shape[-1]
    kept = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
    return x.masked_fill(~kept, float("-inf")).softmax(-1)


def positions(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1], device=x.device)
    return x + torch.where(at % 2 == 0, 1.0, -1.0) / (at + 1)


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 8, w, b)


def heads(x: Tensor, w: Tensor) -> Tensor:
    """A row's statistic, and consumers that see the row as heads."""
    y = F.layer_norm(x, x.shape[-1:])
    return y.view(*x.shape[:2], -1, w.shape[-1]) * w


def flip_of_row(x: Tensor) -> Tensor:
    y = x.softmax(-1)
    return y + y.flip(-1)


def shared_keys(x: Tensor, cos: Tensor) -> Tensor:
    """Gradients of keys that several heads share, turned back: a short sum that is read twice."""
    y = x.sum(2)
    a, b = y.chunk(2, -1)
    return y * cos + torch.cat([b, -a], -1)


def class_gradient(x: Tensor) -> Tensor:
    """The gradient of a loss over classes, from the logarithms of the probabilities."""
    target = torch.arange(x.shape[0], device=x.device)
    aten = torch.ops.aten
    total = x.new_ones((), dtype=torch.float32)
    grad = aten.nll_loss_backward(total, x.float(), target, None, 1, -100, total * x.shape[0])
    return aten._log_softmax_backward_data(grad, x.float(), 1, torch.float32)


def activation_and_bias(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """What a matrix product needs next, and the column sums of it."""
    y = torch.ops.aten.gelu_backward(g, x)
    return y, y.sum(0)


@dataclass(frozen=True, slots=True)
class Case:
    """A program with the shapes of its arguments, large and small, that is one kernel."""

    fn: Callable[..., Any]
    full: tuple[Shape, ...]
    tiny: tuple[Shape, ...]


ONE_KERNEL = [
    Case(
        rms_rotary,
        ((4, 2048, 4096), (4096,), (2048, 1, 128), (2048, 1, 128)),
        ((2, 5, 48), (48,), (5, 1, 16), (5, 1, 16)),
    ),
    Case(concat_pad, ((8192, 3000), (8192, 5000)), ((5, 30), (5, 50))),
    Case(causal_softmax, ((32, 2048, 2048),), ((2, 24, 24),)),
    Case(positions, ((64, 50000),), ((3, 70),)),
    Case(group_norm, ((32, 256, 32, 32), (256,), (256,)), ((2, 24, 5, 3), (24,), (24,))),
    Case(heads, ((8, 512, 768), (64,)), ((2, 3, 24), (8,))),
    Case(flip_of_row, ((4096, 4096),), ((7, 33),)),
    Case(shared_keys, ((8, 4, 3, 512, 64), (512, 64)), ((2, 2, 3, 5, 8), (5, 8))),
    Case(class_gradient, ((8192, 50257),), ((6, 37),)),
    Case(activation_and_bias, ((64, 3072), (64, 3072)), ((9, 20), (9, 20))),
]


@pytest.mark.parametrize("case", ONE_KERNEL, ids=[c.fn.__name__ for c in ONE_KERNEL])
def test_one_kernel(case: Case) -> None:
    assert_kernels(schedule_of(case.fn, *case.full), 1)


@pytest.mark.parametrize("case", ONE_KERNEL, ids=[c.fn.__name__ for c in ONE_KERNEL])
def test_values(case: Case) -> None:
    """In f32, of which no rounding is left out."""
    assert_kernels(assert_triton(lowered(case.fn, tensors(case.tiny, torch.float32))), 1)


def test_column_sums_share_the_pass_that_makes_their_values() -> None:
    s = schedule_of(activation_and_bias, (4096, 3072), (4096, 3072))
    assert_kernels(s, 2)  # the second adds the parts
    assert kernels_of(s)[0].kind == "outer_reduction"


def test_a_channels_last_group_shares_the_loops_of_its_elements() -> None:
    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = x.view(32, 8, 32, 32, 32).float()
        y = y - y.mean((2, 3, 4), keepdim=True)
        y = y * torch.rsqrt(y.square().mean((2, 3, 4), keepdim=True) + 1e-5)
        return (y.view(x.shape) * w[:, None, None] + b[:, None, None]).to(x.dtype)

    x = torch.empty(32, 256, 32, 32, dtype=BF16).to(memory_format=torch.channels_last)
    w, b = tensors(((256,), (256,)))
    assert_kernels(scheduled(on_gpu(lowered(norm, [x, w, b]))), 1)


def test_small_kernels_over_equal_loops_share_a_launch() -> None:
    def sums(*xs: Tensor) -> list[Tensor]:
        return [x.sum(0) for x in xs]

    def maps(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(4, -1, 8).exp(), y.sigmoid()

    assert_kernels(assert_triton(lowered(sums, tensors(((40, 30),) * 3))), 1)
    assert_kernels(assert_triton(lowered(maps, tensors(((4, 24), (8, 12))))), 1)
    # Large ones run by themselves, but for the sums of the parts.
    assert_kernels(schedule_of(sums, *((8192, 4096),) * 3), 4)
    assert_kernels(schedule_of(maps, (8192, 4096), (8192, 4096)), 2)


def test_copies_that_are_alive_at_once_share_a_launch_only_if_they_are_small() -> None:
    def transposed(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = F.conv2d(x, w.contiguous(memory_format=torch.channels_last), padding=1)
        return x

    def steps(*weights: Tensor) -> Tensor:
        for w in weights:
            w.mul_(0.5)
        return weights[0].sum()

    def doubled(*weights: Tensor) -> list[Tensor]:
        return [w * 2 for w in weights]

    def kernels(fn: Callable[..., Any], width: int) -> int:
        image = torch.empty(1, width, 8, 8, dtype=BF16).to(memory_format=torch.channels_last)
        weights = tensors(((width, width, 3, 3),) * 3)
        inputs = [image, *weights] if fn is transposed else weights
        return len(kernels_of(scheduled(on_gpu(lowered(fn, inputs)))))

    assert kernels(transposed, 128) == 1  # 0.28 MiB each
    assert kernels(transposed, 512) == 3  # 4.5 MiB
    assert kernels(doubled, 512) == 1  # results are alive at the end anyway
    assert kernels(steps, 512) == 3  # updates need no new memory; the sum is two kernels


def test_long_rows_are_not_read_again_where_no_cache_holds_them() -> None:
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    assert_kernels(schedule_of(centred, (4096, 8192)), 1)
    assert_kernels(schedule_of(centred, (4096, 50257)), 1)
    assert_kernels(schedule_of(centred, (4096, 1 << 18)), 2)


def test_few_rows_do_not_keep_the_card_idle() -> None:
    def columns(x: Tensor) -> Tensor:
        return x - x.amax(0, keepdim=True)

    assert_kernels(schedule_of(columns, (256, 32768)), 1)
    assert_kernels(schedule_of(columns, (512, 200)), 1)
    assert_kernels(schedule_of(log_softmax, (32, 32768)), 1)
    assert len(kernels_of(schedule_of(columns, (65536, 128)))) > 1


def test_few_rows_do_not_compute_long_formulas() -> None:
    def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        return y, y.flatten(1).mean(1)

    kinds = [k.kind for k in kernels_of(schedule_of(pooled, (32, 512, 7, 7)))]
    assert kinds == ["pointwise", "reduction"]
    assert_kernels(schedule_of(pooled, (4096, 8, 7, 7)), 1)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


@pytest.mark.slow
def test_long_rows_give_maximum_and_sum_in_one_read() -> None:
    x = torch.full((7, 40000), -1.0).add_(torch.randn(40000))
    x[1, :20000] = -torch.inf  # parts that are all -inf, before and behind others
    x[2, 20000:] = -torch.inf
    x[3] = -torch.inf
    x[4, 17] = torch.inf
    x[5, 39999] = torch.nan
    x[6] *= 1e4
    s = assert_triton(lowered(log_softmax, [x]), given=[x])
    # The parts of rows, the rows, and the elements.
    assert_kernels(s, 3)
    reads = [
        k for k in kernels_of(s) if any(p.mode == "in" and p.size is Int(280000) for p in k.params)
    ]
    assert len(reads) == 2, show(s)


def test_rows_that_a_program_holds_are_no_parts() -> None:
    assert_kernels(schedule_of(log_softmax, (512, 32768)), 1)


def layer_norm_gradients(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    aten = torch.ops.aten
    n = [x.shape[-1]]
    _, mean, rstd = aten.native_layer_norm(x, n, w, w, 1e-5)
    dx, dw, db = aten.native_layer_norm_backward(dy, x, n, mean, rstd, w, w, [True] * 3)
    return dx, dw, db, dx.flatten(0, -2).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "count"), [((1024, 264), 256), ((16, 67, 40), 268), ((4096, 4, 24), 512)]
)
def test_sums_over_columns_run_beside_the_rows(shape: Shape, count: int) -> None:
    x = torch.randn(shape)
    s = assert_triton(lowered(layer_norm_gradients, [x, x * 2 + 1, torch.randn(shape[-1])]))
    assert_kernels(s, 2)  # the second adds the parts
    rows = kernels_of(s)[0]
    assert rows.kind == "reduction" and programs(rows) is Int(count)


def test_sums_over_columns_of_rows_too_long_run_by_themselves() -> None:
    s = schedule_of(layer_norm_gradients, (8192, 16384), (8192, 16384), (16384,))
    assert [k.kind for k in kernels_of(s)][:2] == ["reduction", "outer_reduction"]
