"""8-bit floats: every byte, every bf16, random f32 and all ties, to the bit as in torch."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from lenz.ir.dtype import BF16, F8E4M3FN, F16, F32, FLOAT8, DType, short_float_bits
from lenz.ir.expr import expr, ref
from lenz.ir.op import op_named
from lenz.machine.cuda.triton.compile import compile_text
from lenz.ops.cast import _TOP, CAST
from tests.ops.test_forms import evaluate
from tests.ops.triton_kernels import form_named, text_of

INF = float("inf")


def every_byte(d: DType) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(d.torch)


def hard_numbers(d: DType) -> torch.Tensor:
    """All bf16, a million random f32, and the ties between numbers with both neighbours of each."""
    g = torch.Generator().manual_seed(0)
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 20,), generator=g)
    values = every_byte(d).float()
    values = values[values.isfinite()].sort().values
    # The last is the tie with what would follow the greatest number.
    ties = torch.cat([(values[1:] + values[:-1]) / 2, values[-1:] + (values[-1] - values[-2]) / 2])
    ties = torch.cat([ties, -ties])
    up, down = (torch.nextafter(ties, torch.tensor(x)) for x in (INF, -INF))
    return torch.cat([halves.float(), bits.to(torch.int32).view(torch.float32), ties, up, down])


def expanded(x: torch.Tensor, frm: DType, to: DType) -> torch.Tensor:
    """The conversion by the definition that kernels use."""
    assert CAST.expand is not None
    return evaluate(CAST.expand(ref("x", frm), to), {"x": x})


@pytest.mark.parametrize("d", FLOAT8, ids=str)
def test_rounding_is_torch_s(d: DType) -> None:
    x = hard_numbers(d)
    got, want = expanded(x, F32, d), x.to(d.torch)
    wrong = got.view(torch.uint8) != want.view(torch.uint8)
    assert not wrong.any(), f"{x[wrong][:5]} became {got[wrong][:5]}, not {want[wrong][:5]}"


def test_rounding_is_that_of_torch_before_2_12(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_TOP, F8E4M3FN, 0x7F)
    x = hard_numbers(F8E4M3FN)
    got, want = expanded(x, F32, F8E4M3FN).float(), x.to(F8E4M3FN.torch).float()
    want[~(x.abs() <= 464.0)] = float("nan")  # 464 is the tie, which goes down to 448
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    k = text_of("form", [form_named("cast-f32-f8e4m3fn")], 128, 128, 90)
    assert "> 464.0" in k.text and compile_text(k, 90).code


@pytest.mark.parametrize("d", FLOAT8, ids=str)
def test_values_are_torch_s(d: DType) -> None:
    got, want = expanded(every_byte(d), d, F32), every_byte(d).float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    numbers = ~want.isnan()
    assert torch.equal(got.signbit()[numbers], want.signbit()[numbers]), "-0.0 lost its sign"


@pytest.mark.parametrize("d", (*FLOAT8, F16, BF16), ids=str)
def test_constants_have_the_bits_that_torch_gives(d: DType) -> None:
    word = torch.uint8 if d.bytes == 1 else torch.uint16
    # The last one is above the middle of two halves; as an f32 it is the middle, a tie.
    for x in (0.0, -0.0, 0.1, 1e9, -INF, math.nan, 2.0**-20, 17.0, 0.7541503969808208):
        bits = short_float_bits(d, x)
        assert bits == int(torch.full((1,), x, dtype=d.torch).view(word)), x


@pytest.mark.parametrize("d", FLOAT8, ids=str)
def test_no_arithmetic(d: DType) -> None:
    for name in ("add", "mul", "lt", "abs"):
        op = op_named(name)
        with pytest.raises(TypeError):
            expr(op, *[ref("x", d)] * op.arity)
