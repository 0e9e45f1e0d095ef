"""The Triton form of every op on a GPU, against eager on the CPU; the error of f32 functions.

The kernels are those of tests/ops/test_triton_forms.py, compiled and launched as lenz does it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from lenz.ir.dtype import F32, F64, DType
from lenz.machine.cuda.driver import function
from lenz.machine.cuda.triton.compile import compile_text
from lenz.ops.rules import INTS
from tests.ops.test_forms import errors_in_ulp
from tests.ops.triton_kernels import FORMS, Form, arguments, check_form, form_named, text_of

pytestmark = pytest.mark.usefixtures("cuda")

NAMES = list(dict.fromkeys(f.case.op.name for f in FORMS))
# f32 functions of one operand with an error; `or_libm` and powers are in the first test only.
INEXACT = [
    f.case.op.name for f in FORMS if f.case.dtypes == (F32,) and f.case.op.ulp and f.dtype is F32
]
BLOCK, COUNT, DENSE = 1024, 1 << 14, 1 << 22
# The units give 0 for what has no normal f32.
UNITS = ("exp2_unit", "rcp_unit")


def bound(form: Form) -> float:
    """The error that the form may have, in units in the last place of f32."""
    op = form.case.op
    if op.name == "or_libm":
        return 4.0  # that of libdevice's tan, the worst of the three
    error = op.form("cuda").ulp
    return op.ulp if error is None else error


def launch(
    forms: Sequence[Form], samples: Sequence[tuple[torch.Tensor, ...]]
) -> list[torch.Tensor]:
    """The results of all forms from one launch, on the CPU."""
    count = len(samples[0][0])
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    args, outs = arguments(forms, samples)
    on_gpu = [a.cuda() for a in args]
    code = compile_text(text_of("forms", forms, count, BLOCK, arch), arch)
    start = function(code, torch.cuda.current_device(), len(args), 0)
    stream = torch.cuda.current_stream().cuda_stream
    start(stream, count // BLOCK, *[a.data_ptr() for a in on_gpu])
    for mine, found in zip(args, on_gpu, strict=True):
        mine.copy_(found)
    return outs


def near_zeros(x: torch.Tensor, out: torch.Tensor) -> None:
    """Put what eager gives where lgamma has zeros, if an absolute error is small there.

    The CUDA Math API says for lgammaf: 6 ulp outside of -10.001 .. -2.264, larger inside.
    """
    inside = (x > -10.001) & (x < -2.264)
    want = torch.lgamma(x[inside].double()).to(out.dtype)
    torch.testing.assert_close(out[inside], want, rtol=1e-6, atol=2e-7)
    out[inside] = want


@pytest.mark.parametrize("name", NAMES)
def test_forms_agree_with_eager(name: str) -> None:
    forms = [f for f in FORMS if f.case.op.name == name]
    samples = [f.samples(COUNT) for f in forms]
    for f, xs, out in zip(forms, samples, launch(forms, samples), strict=True):
        if name in UNITS:
            want = f.case.op.eager(*xs)  # type: ignore[misc]
            tiny = want.abs() < 2.0**-126
            assert (out[tiny] == 0).all(), name
            out[tiny] = want[tiny]
        if name == "lgamma":
            near_zeros(xs[0], out)
        check_form(f, out, xs, bound(f))


@pytest.mark.parametrize("name", INEXACT)
def test_error_of_functions(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The greatest error over four million values of the domain, which is printed too."""
    form = form_named(f"{name}-f32")
    (x,) = form.samples(DENSE)
    (out,) = launch([form], [(x,)])
    if name == "lgamma":
        near_zeros(x, out)
    want = form.case.op.eager(x.double())  # type: ignore[misc]
    errors = errors_in_ulp(out, want)
    errors[(out.double() - want).abs() <= form.case.op.absolute] = 0.0
    if name in UNITS:
        errors[(want.abs() < 2.0**-126) & (out == 0)] = 0.0
    worst = int(errors.argmax())
    with capsys.disabled():
        print(f"\n{name:14} {errors[worst]:5.2f} ulp of {bound(form):g}, at {x[worst].item()!r}")
    assert errors[worst] <= bound(form), f"{out[worst].item()} for {want[worst].item()}"


@pytest.mark.parametrize("to", INTS, ids=str)
@pytest.mark.parametrize("frm", [F32, F64], ids=str)
def test_floats_out_of_range_become_what_eager_makes_of_them(to: DType, frm: DType) -> None:
    form = form_named(f"cast-{frm}-{to}")
    powers = [s * 2.0**k for k in (7, 8, 15, 16, 31, 32, 63, 64) for s in (1, -1)]
    ends = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, -1.0, -200.5, *powers, 0.0]
    x = torch.tensor(ends, dtype=frm.torch).repeat(BLOCK)[:BLOCK]
    (out,) = launch([form], [(x,)])
    torch.testing.assert_close(out, x.cuda().to(to.torch).cpu(), rtol=0, atol=0)


def test_great_integers_become_halves_by_way_of_f32() -> None:
    """As in eager: 2^40 + 2^32 + 1 is above the middle of two bf16, but as f32 it is the middle."""
    form = form_named("cast-i64-bf16")
    x = torch.full((BLOCK,), 2**40 + 2**32 + 1)
    (out,) = launch([form], [(x,)])
    assert out.float().unique().tolist() == [2.0**40]
