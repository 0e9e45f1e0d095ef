"""8-bit floats on a GPU, to the bit as in eager: all bf16, bytes and ties; quantized rows."""

from __future__ import annotations

import pytest
import torch

import lenz
from lenz.debug.report import KernelReport
from lenz.ir.dtype import DType, dtype_of
from tests.codegen.test_float8 import E4, E5, PROGRAMS, inputs, quantize
from tests.e2e.sides import agree, same
from tests.frontend.test_in_float8 import bytes_of, error, layers, step, weights
from tests.ops.test_float8 import every_byte, hard_numbers

TYPES = (E4, E5)


def known(dtype: torch.dtype) -> DType:
    found = dtype_of(dtype)
    assert found is not None
    return found


@pytest.mark.parametrize("to", TYPES, ids=str)
def test_conversions(to: torch.dtype, device: str) -> None:
    numbers, every = hard_numbers(known(to)).to(device), every_byte(known(to)).to(device)

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.to(to), y.float(), y.bfloat16(), y.double(), y.to(E4), y.to(E5)

    agree(f, lambda: [numbers, every], tol=0.0)


@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 8))
@pytest.mark.parametrize("to", TYPES, ids=str)
def test_few_numbers(to: torch.dtype, n: int, device: str) -> None:
    """A word of four is not filled by one number, a few, or one of each row."""
    x = hard_numbers(known(to))[-3 * n :].reshape(3, n).to(device)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[0].to(to), x.to(to).t(), x.amax(1).to(to), x[2, 0].to(to), x.amax().to(to).float()

    agree(f, lambda: [x], tol=0.0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, device: str) -> None:
    agree(PROGRAMS[name], lambda: [x.to(device) for x in inputs(33, 41)], tol=0.0)


@pytest.mark.parametrize("to", TYPES, ids=str)
def test_quantizing_rows_is_one_kernel(to: torch.dtype, device: str) -> None:
    x = torch.randn(64, 4096, device=device).bfloat16()
    report = lenz.explain(lambda x: quantize(x, to))(x)
    assert [type(n) for n in report.launches] == [KernelReport]
    # Eager multiplies by the reciprocal of a constant divisor, which rounds once more.
    torch.testing.assert_close(report.result[1], quantize(x, to)[1], rtol=2e-7, atol=0.0)  # type: ignore[index]
    values, scale = report.result
    same(values, (x.float() / scale).to(to), 0.0, True)  # type: ignore[has-type]


@pytest.mark.parametrize("to", TYPES, ids=str)
def test_activations_are_saved_in_eight_bits(to: torch.dtype, device: str) -> None:
    inputs, name = [t.to(device) for t in weights(4)], str(to).removeprefix("torch.")
    results, grads, saved = step(layers, inputs, name)
    wanted, exact, usual = step(layers, inputs, None)
    assert all(map(torch.equal, results, wanted))
    assert {t.dtype for t in saved} == {to} and bytes_of(saved) <= 0.55 * bytes_of(usual)
    assert all(error(a, b) < 0.05 for a, b in zip(grads, exact, strict=True))
