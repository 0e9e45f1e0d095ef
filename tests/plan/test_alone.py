"""A plan with its kernels is complete: another process runs it and compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lenz import pipeline, recall
from lenz.frontend import FxProgram, capture
from lenz.ir.printer import show
from lenz.lower import native_ops
from lenz.options import Options

ALONE = """
import json, sys, torch
from lenz.ir.plan import LaunchStep
from lenz.ir.reader import read
from lenz.loading import load
from lenz.machines import loader_of
from lenz.runtime.store import store_at

folder, cases = json.load(open(sys.argv[1]))
found = []
for k, (text, keys) in enumerate(cases):
    plan = read(text)
    counts = {
        s.kernel: (len(s.args), len(s.sizes)) for s in plan.steps if isinstance(s, LaunchStep)
    }
    functions, alive = {}, None
    for device, own in keys.items():
        loader = loader_of(device)
        pieces = {name: store_at(folder).get(loader.kind, key) for name, key in own.items()}
        functions, alive = loader.load(pieces, counts, device)
    args, constants = torch.load(f"{sys.argv[1]}.{k}", weights_only=True)
    torch.manual_seed(0)
    found.append([t.clone() for t in load(plan, functions, alive, constants)(args)])
torch.save(found, sys.argv[1] + ".found")
compilers = ("torch._dynamo", "torch._functorch.aot_autograd", "sympy")
rooms = ("frontend", "lower", "opt", "schedule", "ops", "pipeline", "machine.cpu.llvm.module")
print(*[m for m in (*compilers, *(f"lenz.{r}" for r in rooms)) if m in sys.modules])
"""


def attention(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1) + x.sum(0)


def written(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    w.mul_(2)
    return F.dropout(x, 0.5), w[1:] + 0, x.topk(2).values


def known(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + w.to(torch.float16)[::2].sum()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_plans_run_where_nothing_compiles(tmp_path: Path, dynamic: bool) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    cases, want = [], []
    cx = recall.context(Options(cache_dir=str(tmp_path / "cache")))
    path = tmp_path / "cases"
    for k, fn in enumerate((attention, written, known)):
        p, given = program(fn, dynamic, x, w)
        made = pipeline.compile_program(p, cx, "")
        names = {n.name: str(n.target) for n in p.gm.graph.nodes if n.op == "get_attr"}
        constants = {c.name: p.constants[names[c.name]] for c in made.plan.constants}
        torch.save((copied(given), constants), f"{path}.{k}")
        torch.manual_seed(0)
        want.append([t.clone() for t in made.call(copied(given))])
        cases.append((show(made.plan), made.entry.keys))
    path.write_text(json.dumps((str(tmp_path / "cache"), cases)))
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(path)],
        capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip(), f"imported: {done.stdout}"
    for theirs, ours in zip(torch.load(f"{path}.found"), want, strict=True):
        assert all(map(torch.equal, theirs, ours))


def program(fn: Callable[..., Any], dynamic: bool, *args: Any) -> tuple[FxProgram, list[Any]]:
    """The program of a call, and the arguments that it is given."""
    found: list[tuple[FxProgram, list[Any]]] = []

    def compile_fx(p: FxProgram) -> Callable[[list[Any]], Sequence[Any]]:
        def run(given: list[Any]) -> Sequence[Any]:
            found.append((p, copied(given)))
            return p.eager()(given)

        return run

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture(gm, inputs, compile_fx, Options(cache=False), native_ops())

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic)(*copied(list(args)))
    return found[0]


def copied(args: list[Any]) -> list[Any]:
    return [a.clone() if isinstance(a, Tensor) else a for a in args]
