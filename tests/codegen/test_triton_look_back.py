"""Rows that several programs scan: in Triton's interpreter against the oracle, and as cubins."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.debug.report import KernelReport, launches_report
from lenz.errors import InternalError
from lenz.ir.graph import Extern
from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.plan import Alloc, LaunchStep
from lenz.ir.verify import verify
from lenz.machine.cuda.shape import Shape
from lenz.machine.cuda.triton.kernel import emit
from lenz.pipeline import named
from lenz.plan.build import build
from tests.cuda import cuda_program
from tests.gpu_oracle import (
    TINY,
    assert_function,
    cubins,
    gpu_context,
    interpreted,
    kernels_of,
    kinds_of,
    scheduled,
)
from tests.gpu_oracle import lowered_there as there
from tests.oracle import assert_schedule, roundtrip
from tests.triton_interpreter import Argument, Fault, launch

G = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=G)


def chosen(m: Tensor, s: Tensor) -> Tensor:
    return s[(m.long().cumsum(0) - 1).clamp(min=0)]


NAN = torch.where(normal(3, 70) > 1.5, torch.nan, normal(3, 70)).round()
WIDE = torch.randint(-(2**40), 2**40, (3, 90), generator=G)
SMALL = torch.randint(0, 200, (170, 3), generator=G)
# With parts of 16 elements in groups of 4, rows of 300 have all three kinds of results.
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "sums": (lambda x: x.cumsum(-1) * 2, (normal(2, 300),)),
    "f64, whose results have two words": (lambda x: x.cumsum(-1), (normal(2, 300).double(),)),
    "i64": (lambda x: x.cumsum(-1), (WIDE,)),
    "halves": (lambda x: x.cumsum(-1), (normal(2, 70).bfloat16(),)),
    "columns": (lambda x: x.cumsum(0), (normal(90, 11),)),
    "columns of halves": (lambda x: x.cumprod(0), ((normal(70, 5) / 10 + 1).half(),)),
    "maxima of ties and NaN": (lambda x: x.cummax(-1), (NAN,)),
    "minima down columns": (lambda x: x.cummin(0), (normal(70, 3).bfloat16(),)),
    "u8": (lambda x: x.cummax(0).values, (SMALL.to(torch.uint8),)),
    "i8": (lambda x: x.cummin(0).values, ((SMALL - 100).to(torch.int8),)),
    "bool": (lambda x: x.cummax(0), (normal(70) > 2,)),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), (normal(3, 70),)),
    "from the end": (lambda x: x.flip(-1).cumsum(-1).flip(-1), (normal(3, 70),)),
    "a scan of a scan": (lambda x: (x.cumprod(0) + 1).cumprod(0), (normal(100) / 100,)),
    "indices": (chosen, (normal(200) > 0, normal(200))),
    "before and behind": (
        lambda x: (x.sin().cumsum(1).exp(), x.cumprod(1)),
        (normal(2, 50, 3) / 9,),
    ),
    "in place": (lambda x: x.mul_(2).cumsum_(0), (normal(90),)),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_a_row_of_unknown_length_is_scanned_in_parts_and_right(name: str) -> None:
    fn, args = CASES[name]
    s = assert_function(fn, *args, dynamic=True, tiles=TINY)
    assert "split_scan" in kinds_of(s)
    assert not [x.op for x in s.steps if isinstance(x, Extern)]
    for k in kernels_of(s):
        roundtrip(k)


@pytest.mark.parametrize("name", ["sums", "columns", "i64", "a scan of a scan"])
def test_the_interpreter_of_kernels_knows_parts(name: str) -> None:
    fn, args = CASES[name]
    s = assert_function(fn, *args, dynamic=True, tiles=TINY)
    assert_schedule(s, seeds=(0, 1, 2))


def lowered(fn: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32) -> Schedule:
    return scheduled(there(cuda_program(fn, shape, dtype=dtype)))


def test_long_rows_are_read_once_by_one_kernel() -> None:
    s = lowered(lambda x: x.sin().cumsum(-1).exp(), 10, 131072)
    assert kinds_of(s) == ["split_scan"]
    assert kinds_of(lowered(lambda x: x.cumsum(-1), 10, 30000)) == ["scan"]


def test_scans_with_logarithms_have_small_tiles() -> None:
    """Triton takes up to 69 s to compile large ones."""
    (k,) = kernels_of(lowered(lambda x: x.logcumsumexp(0), 300, 64))
    lanes = [int(n) for n in re.findall(r"tl.arange\(0, (\d+)\)", emit(k).text)]
    assert math.prod(lanes) == 4096 and 512 in lanes
    assert kinds_of(lowered(lambda x: x.logcumsumexp(-1), 64, 4096)) == ["scan"]
    assert kinds_of(lowered(lambda x: x.logcumsumexp(-1), 64, 4100)) == ["split_scan"]


def test_what_a_row_has_once_is_computed_by_other_kernels() -> None:
    s = assert_function(
        lambda x: ((x - x.mean(-1, keepdim=True)).cumsum(-1).amax(-1), x.softmax(-1)),
        normal(3, 80),
        dynamic=True,
        tiles=TINY,
    )
    assert kinds_of(s).count("split_scan") == 1 and kinds_of(s).count("reduction") == 2


def test_the_words_of_a_panel_that_is_not_full_are_counted() -> None:
    (k,) = kernels_of(lowered(lambda x: x.cumsum(0), 1 << 17, 24))
    few = replace(k.params[-1], size=k.params[-1].size - 1)
    with pytest.raises(InternalError, match="words"):
        verify(replace(k, params=(*k.params[:-1], few)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_parts_compile_without_spills(arch: int, dtype: torch.dtype) -> None:
    s = lowered(lambda x: x.cumsum(0), 1 << 26, dtype=dtype)
    assert [b.spills for b in cubins(s, arch)] == [0]


def test_a_static_row_in_parts_of_the_usual_size() -> None:
    assert_function(lambda x: x.cumsum(-1), normal(40_000))


@pytest.mark.parametrize(("shape", "dim"), [((1 << 24,), 0), ((1 << 17, 64), 0), ((40, 50_000), 1)])
@pytest.mark.parametrize("group", [2, 16, 64])
def test_each_thread_has_a_word_of_a_window(shape: tuple[int, ...], dim: int, group: int) -> None:
    """Words that two threads read, at different times, made wrong sums on a card."""
    g = there(cuda_program(lambda x: x.cumsum(dim), shape, dtype=torch.float32))
    (k,) = kernels_of(scheduled(g, Shape(group=group)))
    lanes = {n: int(w) for n, w in re.findall(r"(\w+) = tl.arange\(0, (\d+)\)", emit(k).text)}
    assert lanes["v0_lane"] >= min(group, 16)
    assert lanes["v0_lane"] * lanes.get("p0", 1) >= 32 * k.tile.warps


def parts() -> Kernel:
    (k,) = kernels_of(assert_function(lambda x: x.cumsum(-1), normal(90), dynamic=True, tiles=TINY))
    return k


def memory(k: Kernel, n: int, words: int) -> dict[str, Tensor]:
    x, out, work = (p.name for p in k.params)
    return {x: normal(n), out: torch.zeros(n), work: torch.zeros(words, dtype=torch.int64)}


def test_a_workspace_that_is_not_zeroed_is_a_fault() -> None:
    k = parts()
    (size,) = k.sizes
    given = memory(k, 90, 5 + 1)
    interp_kernel(k, given, {size.name: 90})
    with pytest.raises(InternalError, match="not zero"):
        interp_kernel(k, given, {size.name: 90})
    given = memory(k, 90, 5 + 1)
    interpreted(k, given, {size.name: 90})
    with pytest.raises(AssertionError, match="not zero"):
        interpreted(k, given, {size.name: 90})


def test_a_program_that_waits_for_a_later_one_is_a_fault() -> None:
    """Parts of a row in falling order would wait for ever where not all of them run at once."""
    k = parts()
    given = memory(k, 90, 5 + 1)
    arguments = [
        Argument(p.name, given[p.name], p.mode != "out", p.mode != "in", is_work=p.mode == "work")
        for p in k.params
    ]
    text = emit(k)
    launch(text, arguments, [90], 6)
    given[k.params[-1].name].zero_()
    turned = replace(text, text=text.text.replace("tl.program_id(0)", "(5 - tl.program_id(0))"))
    with pytest.raises(Fault, match="waits for what no earlier one wrote"):
        launch(turned, arguments, [90], 6)


def test_workspaces_are_in_the_launch_only() -> None:
    s = lowered(lambda x: x.cumsum(0), 1 << 20)
    (step,) = [x for x in s.steps if isinstance(x, Launch)]
    assert [p.mode for p in step.kernel.params] == ["in", "out", "work"]
    assert step.kernel.params[-1].size.hi == 511 + 511 // 64


def test_the_plan_zeroes_workspaces_and_the_report_names_them() -> None:
    s = named(lowered(lambda x: (x.cumsum(-1) + 1).flip(0).cumsum(0), 300, 40_000))
    plan = build(s, gpu_context())
    verify(plan)
    fresh: dict[str, int] = {}
    for n, step in enumerate(plan.steps):
        if isinstance(step, Alloc) and step.zero:
            fresh[step.name] = n
        elif isinstance(step, LaunchStep):
            words = [a for a in step.args if a.endswith(".work")]
            assert all(fresh.pop(a) < n for a in words), "zeroed once for each launch"
    reports = [r for r in launches_report(s, {"arg0_1": "x"}) if isinstance(r, KernelReport)]
    (first, *_) = reports
    assert first.kind == "split_scan" and first.loads == ("x",)
    assert [a.rsplit(".", 1)[-1] for a in first.mutated_args] == ["work"]


def test_many_small_terms_are_not_lost() -> None:
    """log(1 + e^x) of f32 is 0 below x = -16.6; 299 such terms are 7.5e-6 together."""
    x = torch.full((300,), -17.5)
    x[0] = 0.0
    (step,) = [s for s in lowered(lambda x: x.logcumsumexp(0), 300).steps if isinstance(s, Launch)]
    y = torch.zeros(300)
    memory = dict(zip([p.name for p in step.kernel.params], (x, y), strict=True))
    interpreted(step.kernel, memory, {})
    want = x.double().logcumsumexp(0)
    assert ((y.double() - want).abs()[1:] / want[1:]).max() < 1e-5


def summed(k: Kernel, x: Tensor) -> Tensor:
    """Running sums of a row, in parts of 16 in groups of 4."""
    given = memory(k, len(x), len(x) // 8)
    x_name, out, _ = given
    given[x_name] = x.clone()
    interpreted(k, given, {k.sizes[0].name: len(x)})
    return given[out]


def test_a_step_between_parts_is_as_good_as_one_inside() -> None:
    """Sums below 1024 are rounded once, by 2^-15; in f32 what is ahead of a part was, often."""
    k = parts()
    for seed in range(8):
        x = 1 + 0.1 * torch.randn(1000, generator=torch.Generator().manual_seed(seed))
        y, want = summed(k, x).double(), x.double().cumsum(0)
        assert (y - want).abs().max() < 2**-15 * 1.5
        assert (y.diff() - x[1:]).abs().max() < 2**-14 * 1.05


def test_parts_of_what_is_no_number_and_of_zeros() -> None:
    k = parts()
    for value in (torch.inf, -torch.inf, torch.nan, 3e38):
        x = torch.ones(1000)
        x[40:500:99] = value
        assert torch.equal(summed(k, x).nan_to_num(nan=7), x.cumsum(0).nan_to_num(nan=7))
    zeros = torch.full((300,), -0.0)
    assert torch.signbit(summed(k, zeros)).all()  # eager's, of all there is as one row
