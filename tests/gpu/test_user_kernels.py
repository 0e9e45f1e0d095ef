"""Programs that call Triton kernels of their own, on a GPU, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import lenz
from lenz.debug.report import ExternReport
from tests import user_kernels as programs
from tests.e2e.sides import agree, gradients_agree
from tests.user_kernels import PROGRAMS, Program


def vectors(p: Program, device: str) -> list[torch.Tensor]:
    return [torch.randn(300, device=device) for _ in range(p.count)]


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("p", PROGRAMS, ids=str)
def test_programs(p: Program, dynamic: bool, cuda: str) -> None:
    agree(p.fn, lambda: vectors(p, cuda), dynamic=dynamic, fullgraph=True, calls=2)


@pytest.mark.parametrize("p", PROGRAMS, ids=str)
def test_nothing_else_is_left_to_eager(p: Program, cuda: str) -> None:
    report = lenz.explain(p.fn)(*vectors(p, cuda))
    called = [n for n in report.launches if isinstance(n, ExternReport)]
    assert {n.op for n in called} <= {"lenz.user_kernel", "aten.empty_strided.default"}
    assert len(report.launches) - len(called) <= p.kernels


def test_gradients(cuda: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return programs.Sum.apply(x.sin(), y * 2).cos()

    gradients_agree(f, lambda: [torch.randn(300, device=cuda, requires_grad=True) for _ in "xy"])


def test_sizes_that_change(cuda: str) -> None:
    run = torch.compile(programs.surrounded, backend="lenz", dynamic=True, fullgraph=True)
    for n in (300, 17, 1025):
        x, y = torch.randn(n, device=cuda), torch.randn(n, device=cuda)
        torch.testing.assert_close(run(x, y), programs.surrounded(x, y))


def test_inside_of_a_module(cuda: str) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.nn.functional.gelu(self.linear(x))
            return programs.Sum.apply(h, x).tanh() * 2

    m = Block().to(cuda)
    x = torch.randn(32, 64, device=cuda)
    grads: list[Any] = []
    for run in (m, torch.compile(m, backend="lenz")):
        m.zero_grad()
        run(x).sum().backward()
        grads.append([p.grad.clone() for p in m.parameters() if p.grad is not None])
    assert len(grads[0]) == 2
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def test_on_the_current_stream(cuda: str) -> None:
    run = torch.compile(programs.in_place, backend="lenz", fullgraph=True)
    x, y = (torch.randn(300, device=cuda) for _ in range(2))
    run(x.clone(), y)
    wanted = x * 8 + y
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what runs on another stream would be done before
        late = x.clone()
        got = run(late, y)
    stream.synchronize()
    torch.testing.assert_close((got, late), (wanted, x * 8))
