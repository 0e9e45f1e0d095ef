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

        def compiled(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            return capture(gm, inputs, backend.compile_fx, Options(cache=False), native_ops())

        torch._dynamo.reset()
        run = torch.compile(p.function(), backend=compiled, dynamic=seed % 3 == 2)
        try:
            run(*[s.make() for s in p.specs])
        except Exception as e:
            e.args = (f"seed {seed}:\n{p}\n{e}",)
            raise
        kernels += backend.kernels
    assert len(kernels) > 3, "the programs made no kernels"
