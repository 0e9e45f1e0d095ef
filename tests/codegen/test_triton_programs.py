"""Random programs (tests/e2e/programs.py) through the Triton kernels that a GPU would run.

A third has symbolic sizes, and every other one tiny tiles. `--all-kernels` takes 200 of them, and
compiles every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_oracle import TINY, cubins, interpreted, lowered_there, scheduled, texts_of

from lenz.frontend import FxProgram, capture
from lenz.ir.interp_schedule import interp_schedule
from lenz.ir.printer import show
from lenz.lower import native_ops
from lenz.options import Options
from lenz.pipeline import Boxed
from lenz.schedule.blocks import Shape
from tests.e2e.programs import compare, copied, program

pytest.importorskip("triton")

SAMPLE, ALL, PARTS = 32, 200, 8


@dataclass(slots=True)
class Interpreted:
    """Compiles graphs to a check of their kernels, which then gives what the graph gives."""

    tiles: Shape | None
    compiles: bool
    kernels: list[str] = field(default_factory=list)

    def compile(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """The backend, as Dynamo calls it."""
        return capture(gm, inputs, self.compile_fx, Options(cache=False), native_ops())

    def compile_fx(self, p: FxProgram) -> Boxed:
        """Schedule a graph for a GPU; the callable runs its kernels beside the graph."""
        s = scheduled(lowered_there(p), self.tiles)
        self.kernels += texts_of(s)
        if self.compiles:
            cubins(s)
        targets = {n.name: str(n.target) for n in p.gm.graph.nodes if n.op == "get_attr"}
        constants = [p.constants[targets[c.name]] for c in s.graph.constants]
        message = "\n".join([show(s), *texts_of(s)])

        def run(args: list[Any]) -> Sequence[Any]:
            given, inputs = copied(args), copied(args)
            found = p.interpret(list(inputs))
            wanted = [x.clone() if isinstance(x, torch.Tensor) else x for x in found]
            try:
                got = interp_schedule(
                    s, copied(given), constants, objects=p.modules, run_kernel=interpreted
                )
            except Exception as e:
                raise AssertionError(f"{type(e).__name__}: {e}\n{message}") from e
            compare(list(got.outputs), wanted, f"outputs of\n{message}")
            compare(list(got.inputs), inputs, f"inputs after\n{message}")
            return p.interpret(args)

        return run


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of programs that it finds odd
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int, all_kernels: bool) -> None:
    kernels: list[str] = []
    for seed in range(part, ALL if all_kernels else SAMPLE, PARTS):
        p = program(seed)
        backend = Interpreted(TINY if seed // PARTS % 2 else None, all_kernels)
        torch._dynamo.reset()
        run = torch.compile(p.function(), backend=backend.compile, dynamic=seed % 3 == 2)
        try:
            run(*[s.make() for s in p.specs])
        except Exception as e:
            e.args = (f"seed {seed}:\n{p}\n{e}",)
            raise
        kernels += backend.kernels
    assert len(kernels) > 3, "the programs made no kernels"


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
    for tiles in (None, TINY) if all_kernels else (None,):
        torch.manual_seed(0)
        model = Block()
        backend = Interpreted(tiles, all_kernels)

        def loss(ids: torch.Tensor, model: Block = model) -> torch.Tensor:
            logits = model(ids[:, :-1]) @ model.tokens.weight.t()
            return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

        torch._dynamo.reset()
        torch.compile(loss, backend=backend.compile)(ids).backward()
        assert len(backend.kernels) > 15, "forward and backward make more kernels"
