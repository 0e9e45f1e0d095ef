"""Graphs for CUDA are captured without a GPU, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cuda import Fake, cuda_program, cuda_programs, fake_cuda, programs_of


def test_a_graph_on_cuda_is_captured_without_a_gpu() -> None:
    p = cuda_program(lambda x, w: F.gelu(x @ w).sum(1), (4, 8), (8, 16))
    assert {str(n.meta["val"].device) for n in p.nodes} == {"cuda:0"}
    assert p.kind == "inference"


def test_a_training_step_has_both_halves() -> None:
    with fake_cuda():
        with torch.device("cuda"):
            model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU())
        programs = programs_of(model, Fake((4, 8), torch.float32).make())
    assert [p.kind for p in programs] == ["forward", "backward"]
    devices = {q.value.device.type for p in programs for q in p.placeholders}
    assert devices == {"cuda"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch chooses the kernel itself")
@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_attention_takes_the_kernel_it_is_told(kernel: str) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    programs = cuda_programs(f, *[(2, 4, 128, 64)] * 3, grad=True, attention=kernel)  # type: ignore[arg-type]
    for p in programs:
        assert any(f"_scaled_dot_product_{kernel}_attention" in str(n.target) for n in p.nodes)


def test_cuda_is_gone_afterwards() -> None:
    cuda_program(lambda x: x + 1, (4,))
    assert not torch.accelerator.is_available() or torch.cuda.is_available()
