"""What Triton kernels do to memory: nothing outside of their buffers, no race, inputs in place.

Buffers of the interpreter here are watched (tests/triton_interpreter.py); the first tests show that
it finds the faults it is there for, in kernels that are wrong on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.gpu_oracle import TINY, assert_function, interpreted, kernels_of

pytest.importorskip("triton")

from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import Kernel, programs
from lenz.ir.reader import read
from lenz.machine.cuda.triton.compile import KernelText
from lenz.machine.cuda.triton.kernel import emit
from lenz.sym import evaluate
from tests.triton_interpreter import Argument, Fault, launch

HEAD = (
    "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n"
    "@triton.jit\ndef k(a0, a1):\n"
)
WRONG: dict[str, tuple[str, str]] = {
    "reads behind the end": (
        "%a0 is read at 8, it has 8 elements",
        "tl.store(a1 + tl.arange(0, 8), tl.load(a0 + 1 + tl.arange(0, 8)))",
    ),
    "reads before the start": (
        "%a0 is read at -1",
        "tl.store(a1 + tl.arange(0, 8), tl.load(a0 + tl.arange(0, 8) - 1))",
    ),
    "reads far away": (
        "far away",
        "tl.store(a1 + tl.arange(0, 8), tl.load(a0 + tl.arange(0, 8).to(tl.int64) * 2**40))",
    ),
    "writes behind the end": (
        "%a1 is written at 8",
        "tl.store(a1 + tl.arange(0, 16), 1.0, tl.arange(0, 16) < 9)",
    ),
    "writes an input": (
        "%a0 is written, which is only read",
        "tl.store(a0 + tl.arange(0, 8), 1.0)",
    ),
    "two programs write": (
        "program 1 writes what another one writes",
        "tl.store(a1 + tl.program_id(0) * 2 + tl.arange(0, 4), 1.0)",
    ),
    "a program reads what another wrote": (
        "program 1 reads what another one wrote",
        "tl.store(a1 + tl.program_id(0), 1.0)\n    tl.debug_barrier()\n    tl.load(a1 + 0)",
    ),
    "a program writes what another read": (
        "program 1 writes what another one reads",
        "x = tl.load(a1 + 1)\n    tl.store(a1 + tl.program_id(0), x)",
    ),
    "reads what it wrote": (
        "%a1 is read without a barrier",
        "tl.store(a1 + tl.arange(0, 8), 1.0)\n    x = tl.load(a1 + tl.arange(0, 8))",
    ),
    "writes what it read": (
        "%a1 is overwritten without a barrier",
        "x = tl.load(a1 + tl.arange(0, 8))\n    tl.store(a1 + tl.arange(0, 8), 1.0)",
    ),
    "lanes disagree": (
        "lanes store different values",
        "tl.store(a1 + tl.arange(0, 8) // 2, tl.arange(0, 8).to(tl.float32))",
    ),
}


def run(body: str, count: int = 2) -> torch.Tensor:
    """Run a body over two buffers of 8, of which it may write the second; gives that."""
    text = KernelText("k", f"{HEAD}    {body}\n", ("*fp32", "*fp32"), (), 1, 1, False)
    out = torch.zeros(8)
    launch(
        text,
        [Argument("a0", torch.ones(8), True, False), Argument("a1", out, True, True)],
        [],
        count,
    )
    return out


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_is_found(name: str) -> None:
    message, body = WRONG[name]
    with pytest.raises(Fault, match=message):
        run(body)


def test_barriers_and_values_make_it_right() -> None:
    run("tl.store(a1 + tl.arange(0, 8), 1.0)\n    tl.debug_barrier()\n    tl.load(a1 + 0)", 1)
    at = "a1 + tl.arange(0, 8)"
    assert run(f"tl.store({at}, tl.load({at}) + 1.0)", 1).tolist() == [1.0] * 8
    kept = f"x = tl.load({at})\n    tl.debug_barrier()\n    tl.store({at}, 1.0)"
    assert run(kept, 1).tolist() == [1.0] * 8


def test_lanes_that_are_off_hold_junk() -> None:
    lanes = "x = tl.load(a0 + tl.arange(0, 8), tl.arange(0, 8) < 5)\n    "
    out = run(lanes + "tl.store(a1 + tl.arange(0, 8), x)", 1)
    assert out[:5].tolist() == [1.0] * 5 and out[5:].isnan().all()


def test_functions_of_libdevice_broadcast() -> None:
    row = "y = tl.load(a0 + tl.arange(0, 4))[None, :] * 2.0"
    column = "x = (tl.arange(0, 2) + 3.0)[:, None]"
    both = "z = tl.reshape(libdevice.fmod(x, y), [8])"
    found = run(f"{column}\n    {row}\n    {both}\n    tl.store(a1 + tl.arange(0, 8), z)", 1)
    assert found.tolist() == [1.0] * 4 + [0.0] * 4


def add_one(x: torch.Tensor) -> tuple[()]:
    x.add_(1)
    return ()


def overwrite_by_softmax(x: torch.Tensor) -> tuple[()]:
    x.copy_(x.softmax(-1))
    return ()


def write_both(x: torch.Tensor, y: torch.Tensor) -> tuple[()]:
    x.copy_(y + x)
    y.copy_(y * 2)
    return ()


def write_a_part(x: torch.Tensor) -> torch.Tensor:
    x[1:].mul_(2)
    return x + 1


def flip_in_place(x: torch.Tensor) -> tuple[()]:
    x.copy_(x.flip(0) + 0)
    return ()


def shift_in_place(x: torch.Tensor) -> tuple[()]:
    x.copy_(F.pad(x[:, 1:], (1, 0)) + x)
    return ()


def transposed_in_place(x: torch.Tensor) -> tuple[()]:
    x.t().copy_(x + x.t())
    return ()


def clear_after_a_sum(x: torch.Tensor) -> torch.Tensor:
    y = x.softmax(1).sum(0)
    x.zero_()
    return y


def center(x: torch.Tensor) -> torch.Tensor:
    x.copy_(x - x.mean(1, keepdim=True))
    return x.sum()


def two_results_of_a_row(x: torch.Tensor) -> torch.Tensor:
    y = x * x.sum(1, keepdim=True)
    x.mul_(2)
    return y


def adam(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> tuple[()]:
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.sub_(0.1 * m / (v.sqrt() + 1e-8))
    return ()


IN_PLACE: tuple[Callable[..., Any], ...] = (
    add_one, overwrite_by_softmax, write_both, write_a_part, flip_in_place, shift_in_place,
    transposed_in_place, clear_after_a_sum, center, two_results_of_a_row, adam,
)  # fmt: skip


@pytest.mark.parametrize("fn", IN_PLACE, ids=lambda f: f.__name__)
def test_inputs_are_overwritten(fn: Callable[..., Any]) -> None:
    count = fn.__code__.co_argcount
    inputs = [torch.rand(13, 13, generator=torch.Generator().manual_seed(k)) for k in range(count)]
    for tiles in (None, TINY):
        s = assert_function(fn, *inputs, tiles=tiles)
        assert any(p.mode != "in" for k in kernels_of(s) for p in k.params)


def test_a_barrier_stands_only_where_it_is_needed() -> None:
    def fences(fn: Callable[..., Any]) -> list[bool]:
        s = assert_function(fn, torch.rand(13, 13))
        found = [(k, "tl.debug_barrier()" in emit(k).text) for k in kernels_of(s)]
        return [fence for k, fence in found if any(p.mode == "inout" for p in k.params)]

    assert fences(add_one) == [False], "the value that is stored was computed from the load"
    assert fences(overwrite_by_softmax) == [False]
    assert fences(shift_in_place) == [True], "a masked load may still be on its way"


ORDERED: dict[str, str] = {
    "other lanes read what was written": """
        store(%a0, [i], 2.0:f32)
        store(%a1, [i], load(%a0, [-i + 99]))""",
    "other lanes have read what is written": """
        v0 = load(%a0, [-i + 99])
        store(%a0, [i], 2.0:f32)
        store(%a1, [i], v0)""",
    "read, write, read": """
        v0 = load(%a0, [i])
        store(%a0, [i], add(v0, 1.0:f32))
        v1 = load(%a0, [-i + 99])
        store(%a1, [i], add(v0, v1))""",
}


@pytest.mark.parametrize("name", ORDERED)
def test_statements_that_must_keep_their_order(name: str) -> None:
    """What the interpreter of kernels cannot run, lane after lane, as threads of a GPU do."""
    k = read(f"""kernel @k pointwise (%a0: inout f32[100], %a1: out f32[100]) tile(warps: 4) {{
      for i in 128 below 100 : lane {{{ORDERED[name]}
      }}
    }}""")
    text = emit(k)  # type: ignore[arg-type]
    x, y = torch.rand(100), torch.zeros(100)
    interpreted(k, {"a0": x.clone(), "a1": y}, {})  # type: ignore[arg-type]
    without = replace(text, text=text.text.replace("    tl.debug_barrier()\n", ""))
    with pytest.raises(Fault, match="without a barrier"):
        both = [Argument("a0", x.clone(), True, True), Argument("a1", y, False, True)]
        launch(without, both, [], 1)


def test_a_loop_that_does_not_run_reads_nothing() -> None:
    """The element is the same in every round, so that its load could stand before the loop."""
    k = read("""kernel @k reduction (%a0: in f32[n], %a1: out f32[4]; n: 0..) tile(warps: 1) {
      for p in 4 : lane {
        for r in n : seq { v0 = reduce sum { load(%a0, [0]) } over r }
        store(%a1, [p], v0)
      }
    }""")
    for n in (0, 3):
        assert ran(k, {"n": n}, a0=torch.ones(n), a1=torch.zeros(4)).tolist() == [float(n)] * 4  # type: ignore[arg-type]


def test_a_branch_runs_one_of_its_bodies() -> None:
    """Both name a value alike, and the second may not use what only the first has computed."""
    k = read("""kernel @k reduction (%a0: in f32[n], %a1: out f32[n]; n: 1..) tile(warps: 1) {
      for b in (n + 7)//8 : grid {
        if 8*b + 7 < n {
          for r in 8 : lane { v0 = reduce max { load(%a0, [8*b + r]) } over r }
          for r in 8 : lane { store(%a1, [8*b + r], sub(load(%a0, [8*b + r]), v0)) }
        } else {
          for r in 8 below n - 8*b : lane { v0 = reduce sum { load(%a0, [8*b + r]) } over r }
          for r in 8 below n - 8*b : lane { store(%a1, [8*b + r], mul(load(%a0, [8*b + r]), v0)) }
        }
      }
    }""")
    for n in (1, 8, 13, 24):
        ran(k, {"n": n}, a0=torch.rand(n), a1=torch.zeros(n))  # type: ignore[arg-type]


def ran(k: Kernel, sizes: dict[str, int], **buffers: torch.Tensor) -> torch.Tensor:
    """Run a kernel, compare it with the oracle, and give its last buffer."""
    wanted = {name: t.clone() for name, t in buffers.items()}
    interp_kernel(k, wanted, sizes)
    interpreted(k, buffers, sizes)
    for name, t in wanted.items():
        torch.testing.assert_close(buffers[name], t)
    assert evaluate(programs(k), {v: sizes[v.name] for v in k.sizes}) > 0
    return buffers[k.params[-1].name]
