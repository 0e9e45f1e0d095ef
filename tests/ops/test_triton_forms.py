"""The Triton form of every op: it compiles for sm_90, and gives what eager gives.

There is no GPU here: Triton's interpreter runs the text on the CPU.  It has no `libdevice`, and its
2^x and 1/x are better than those of a GPU; tests/gpu/test_op_forms.py runs the same kernels there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from lenz.ir.dtype import F8E5M2, FLOAT8, I64, DType
from lenz.ir.expr import load
from lenz.ir.kernel import For, Kernel, Param, Store, TileConfig
from lenz.ir.tensor import axis, lane_axis
from lenz.machine.cuda.triton.compile import KernelText, compile_text
from lenz.machine.cuda.triton.kernel import emit
from lenz.ops import assert_in_range
from lenz.sym import sym
from tests.ops.triton_kernels import FORMS, Form, arguments, check_form, form_named, text_of

COUNT = 4096
PARTS = 4

# Calls of libdevice, which the interpreter cannot make.
NOT_INTERPRETED = {
    "fmod": "f32 f64", "div_floor": "f32 f64", "remainder": "f32 f64", "or_libm": "f32 f64",
    "sin": "f32 f64", "cos": "f32 f64", "tan": "f32 f64", "lgamma": "f32 f64",
    "nextafter": "f32 f64", "exp": "f64", "exp2": "f64", "expm1": "f64", "log": "f64",
    "log2": "f64", "log10": "f64", "log1p": "f32 f64", "tanh": "f64", "erf": "f64",
    "erfc": "f32 f64", "asin": "f64", "acos": "f64", "atan": "f64", "atan2": "f64",
    "sinh": "f32 f64", "cosh": "f64", "asinh": "f32 f64", "acosh": "f32 f64", "atanh": "f32 f64",
    "sigmoid": "f64", "pow": "f32 f64", "hypot": "f32 f64", "erfinv": "f32",
}  # fmt: skip


def is_interpreted(form: Form) -> bool:
    """True when the interpreter runs the form."""
    return form.case.dtypes[-1].name not in NOT_INTERPRETED.get(form.case.op.name, "").split()


def test_the_list_of_what_is_not_interpreted_is_true() -> None:
    calls = {str(f) for f in FORMS if "libdevice." in text_of("k", [f], 128, 128).text}
    assert calls == {str(f) for f in FORMS if not is_interpreted(f)}


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_forms_compile_for_a_gpu(part: int) -> None:
    forms = [f for f in FORMS[part::PARTS] if f.case.op.name != "pow" or f.dtype.bits == 32]
    binary = compile_text(text_of("forms", forms, 128, 128, 90), 90)
    assert binary.code[:4] == b"\x7fELF"


def interpret(folder: Path, kernels: list[tuple[KernelText, list[torch.Tensor]]]) -> str:
    """Run kernels in the interpreter; their tensors are changed in place. Gives what it printed."""
    for k, args in kernels:
        (folder / f"{k.name}.py").write_text(k.text)
        torch.save(args, folder / f"{k.name}.in")
    script = Path(__file__).with_name("interpret_kernels.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], env=env, capture_output=True, text=True
    )
    if done.returncode == 0:
        for k, args in kernels:
            for mine, found in zip(args, torch.load(folder / f"{k.name}.out"), strict=True):
                mine.copy_(found)
    return done.stderr


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_forms_agree_with_eager(part: int, tmp_path: Path) -> None:
    forms = [f for f in FORMS[part::PARTS] if is_interpreted(f)]
    samples = [f.samples(COUNT) for f in forms]
    args = [arguments([f], [xs]) for f, xs in zip(forms, samples, strict=True)]
    kernels = [
        (text_of(f"form_{n}", [f], COUNT, COUNT), a)
        for n, (f, (a, _)) in enumerate(zip(forms, args, strict=True))
    ]
    printed = interpret(tmp_path, kernels)
    assert not printed, printed
    for f, xs, (_, (out,)) in zip(forms, samples, args, strict=True):
        check_form(f, out, xs, f.case.op.ulp)


def gather(name: str) -> KernelText:
    """out[i] = x[i] for 4 elements, each checked against the limit n[0]."""
    v = lane_axis(axis("v", sym(4)))
    value = assert_in_range(load("x", (v.var,), I64), load("n", (sym(0),), I64))
    sizes = {"x": 4, "n": 1, "out": 4}
    params = [Param(p, I64, sym(n), "out" if p == "out" else "in") for p, n in sizes.items()]
    body = (For(v, "lane", (Store("out", v.var, value),)),)
    return emit(Kernel(name, "pointwise", tuple(params), (), body, tile=TileConfig(warps=4)))


@pytest.mark.slow
def test_a_checked_index_stays_in_range(tmp_path: Path) -> None:
    def run(name: str, xs: list[int]) -> tuple[KernelText, list[torch.Tensor]]:
        k = gather(name)
        lines = k.text.splitlines(keepends=True)
        text = "".join(line for line in lines if "device_assert" not in line)
        assert k.checks and text != k.text
        return replace(k, text=text), [torch.tensor(xs), torch.tensor([5]), torch.zeros(4).long()]

    inside, outside = run("inside", [0, 1, 4, 3]), run("outside", [5, -1, 2**62, -(2**63)])
    assert not interpret(tmp_path, [inside, outside])
    assert inside[1][-1].tolist() == [0, 1, 4, 3]
    assert outside[1][-1].tolist() == [0, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("x", [-1, 5])
def test_a_failed_check_stops_the_kernel(x: int, tmp_path: Path) -> None:
    args = [torch.tensor([0, 1, x, 3]), torch.tensor([5]), torch.zeros(4).long()]
    assert "index out of range" in interpret(tmp_path, [(gather("gather"), args)])


# Instructions per element that a kernel of bf16 hides behind the memory of an H200: 132 SMs issue
# 4 x 32 lanes at 1.75 GHz, and 4.3 TB/s bring 1.1e12 elements in and out, so 27 of them.
BUDGETS = {"exp": 10, "exp2": 6, "sigmoid": 13, "tanh": 17, "erf": 24, "one_plus_erf": 14}


def instructions(form: Form, per_thread: int) -> Counter[str]:
    """The instructions of sm_90 by name, for a kernel with so many elements in a thread."""
    from triton import knobs

    count = 128 * per_thread
    binary = compile_text(text_of("form", [form], count, count, 90), 90)
    file = Path(os.environ["LENZ_CACHE_DIR"]).parent / f"{form}.cubin"
    file.write_bytes(binary.code)
    tool = knobs.nvidia.nvdisasm.path
    text = subprocess.run([tool, "-c", str(file)], capture_output=True, text=True, check=True)
    lines = [line.split("*/", 1)[1].split(";")[0].split() for line in text.stdout.splitlines()
             if line.strip().startswith("/*")]  # fmt: skip
    return Counter(next(w for w in line if w[0] != "@").split(".")[0] for line in lines)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", BUDGETS)
def test_hot_functions_are_short(name: str) -> None:
    form = form_named(f"{name}-f32")
    made, copied = instructions(form, 8), instructions(form_named("neg-f32"), 8)
    per_element = (made - copied).total() / 8
    assert per_element <= BUDGETS[name], made
    assert made["CALL"] == 0 and made["BRA"] <= copied["BRA"], f"{name} has a slow path"


@pytest.mark.parametrize("to", FLOAT8, ids=str)
def test_8_bit_floats_are_made_by_the_instruction_for_it(to: DType) -> None:
    form, copied = form_named(f"cast-f32-{to}"), instructions(form_named("neg-f32"), 16)
    made = instructions(form, 16)
    assert made["F2FP"] == 8, "two at a time, four in a word"
    # Infinities of f8e5m2 take one comparison, and their bytes come and go one by one.
    assert (made - copied).total() / 16 <= (7.0 if to is F8E5M2 else 3.0), made
