"""8-bit floats through both code generators: the LLVM kernels run, those of Triton interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lenz
from lenz.debug.report import KernelReport
from lenz.ir.graph import Graph
from lenz.ir.kernel import Launch
from lenz.ir.tensor import Buffer
from lenz.lower import lower
from tests.cuda import CX, Fake, cuda_program
from tests.e2e.sides import agree, same

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
TOP = {E4: 448.0, E5: 57344.0}


def quantize(x: torch.Tensor, to: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit floats with a scale per row, as quantized models have them."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / TOP[to]
    return (x.float() / scale).clamp(-TOP[to], TOP[to]).to(to), scale


PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "between": lambda x, y, z: (x.to(E4), x.to(E5), y.to(E5), z.to(E4), y.bfloat16(), z.float()),
    "others": lambda x, y, z: (y.double(), z.int(), y.bool(), z.half(), x.int().to(E4)),
    "joined": lambda x, y, z: (torch.cat([y, x.to(E4)], 1), F.pad(z, (2, 1), value=0.3)),
    "chosen": lambda x, y, z: torch.where(x > 0, y.t().contiguous().t(), z.to(E4)),
    "sums": lambda x, y, z: (y.float() * z.float() - x).sum(-1).to(E4),
    "transposed": lambda x, y, z: (y.t().contiguous(), (x.t() * 3).to(E5), z.t().float()),
}


def inputs(rows: int, columns: int) -> list[torch.Tensor]:
    n = rows * columns
    x = torch.linspace(-700, 700, n).reshape(rows, columns).bfloat16()
    small = (torch.arange(n) % 120).to(torch.uint8).reshape(rows, columns)  # positive and finite
    return [x, small.view(E4), small.view(E5)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_cpu(name: str) -> None:
    for rows, columns in ((33, 41), (3, 64)):
        agree(PROGRAMS[name], lambda r=rows, c=columns: inputs(r, c), tol=0.0)  # type: ignore[misc]


@pytest.mark.parametrize("to", (E4, E5), ids=str)
def test_every_bf16_and_every_byte_on_the_cpu(to: torch.dtype) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bits = torch.arange(256, dtype=torch.uint8).view(to)
    agree(lambda x, y: (x.to(to), y.float()), lambda: [halves, bits], tol=0.0)


@pytest.mark.parametrize("to", (E4, E5), ids=str)
def test_quantizing_rows_is_one_kernel(to: torch.dtype) -> None:
    x = torch.randn(40, 300).bfloat16()
    report = lenz.explain(lambda x: quantize(x, to))(x)
    assert [type(n) for n in report.launches] == [KernelReport]
    same(report.result, quantize(x, to), 0.0, True)


def cuda_graph(fn: Callable[..., Any], *args: Any) -> Graph:
    p = cuda_program(fn, *args)
    return lower(p, CX)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gpu(name: str) -> None:
    from tests.gpu_oracle import assert_triton

    shape = (9, 41)
    g = cuda_graph(PROGRAMS[name], shape, Fake(shape, E4), Fake(shape, E5))
    of_dtype = {x.dtype: x for x in inputs(*shape)}  # Dynamo orders arguments by their first use
    assert_triton(g, given=[of_dtype[b.dtype.torch] for b in g.inputs if isinstance(b, Buffer)])


@pytest.mark.parametrize("to", (E4, E5), ids=str)
def test_quantizing_rows_is_one_kernel_on_a_gpu(to: torch.dtype) -> None:
    from tests.gpu_oracle import assert_triton

    s = assert_triton(cuda_graph(lambda x: quantize(x, to), (16, 200)))
    assert [type(n) for n in s.steps] == [Launch]
