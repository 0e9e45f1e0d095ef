"""Random programs (tests/fuzz) through the Triton kernels that a GPU would run.

A third has symbolic sizes, and every other one tiny tiles. `--all-kernels` takes 200 of them, and
compiles every kernel.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lenz.options import Options
from tests.fuzz.check import Stages, failure
from tests.fuzz.generator import program

pytest.importorskip("triton")

SAMPLE, ALL, PARTS = 32, 200, 8


@pytest.mark.one_in(8)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of programs that it finds odd
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int, all_kernels: bool) -> None:
    for seed in range(part, ALL if all_kernels else SAMPLE, PARTS):
        p = program(seed)
        way = "tiny" if seed // PARTS % 2 else "triton"
        why = failure(p, f"{way} cubins" if all_kernels else way)
        assert not why, f"{p}\n{why}"


class Block(torch.nn.Module):
    """A small decoder: its loss and its gradients are loops of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(50, 16), torch.nn.Embedding(12, 16)
        self.first, self.second = torch.nn.LayerNorm(16), torch.nn.GroupNorm(2, 16)
        self.mix, self.up = torch.nn.Linear(16, 48), torch.nn.Linear(16, 40)
        self.down = torch.nn.Linear(40, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.mix(self.first(x)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / 4.0).masked_fill(
            torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool(), float("-inf")
        )
        x = x + scores.softmax(-1) @ v
        y = self.second(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(y)))


def test_a_training_step(all_kernels: bool) -> None:
    """Forward and backward: every kernel gives what the graph gives."""
    ids = torch.arange(3 * 9).view(3, 9) * 7 % 50
    for way in ("triton cubins", "tiny cubins") if all_kernels else ("triton",):
        torch.manual_seed(0)
        model = Block()
        stages = Stages(Options(cache=False), way, [])

        def loss(ids: torch.Tensor, model: Block = model) -> torch.Tensor:
            logits = model(ids[:, :-1]) @ model.tokens.weight.t()
            return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

        torch._dynamo.reset()
        torch.compile(loss, backend=stages.backend)(ids).backward()
        assert stages.kernels > 15, "forward and backward make more kernels"
