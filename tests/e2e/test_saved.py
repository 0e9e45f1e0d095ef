"""`aot_compile` of torch: saved in one process, run in another, where nothing is traced."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lenz.errors import UserError
from tests.arch.source import REPOSITORY

LOAD = getattr(torch.compiler, "load_compiled_function", None)
pytestmark = pytest.mark.skipif(LOAD is None, reason="torch before 2.13 saves nothing")


def pointwise(x: Tensor) -> Tensor:
    return x.sin() + 1


def views_and_writes(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """A written argument, a view of one, an argument itself, and a number from a size."""
    y.mul_(2)
    return x.t(), y, (x @ x.t()).softmax(-1)[0], x[1:] * x.shape[0]


def attention(q: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    made: Tensor = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    return made * 2


def layers(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x)
    return made.square().mean()


def network() -> nn.Module:
    """Without a norm: its epsilon has Dynamo begin again, which `aot_compile` does not do."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def rows(n: int, *others: int) -> Tensor:
    return torch.linspace(-2, 2, n * 8 * len(others or (1,))).reshape(n, 8, *others)


# For each program what it is compiled for, and what it is called with after it is loaded.
CASES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], tuple[int, ...]]] = {
    "pointwise": (pointwise, lambda n: (rows(n),), (5,)),
    "views": (views_and_writes, lambda n: (rows(n), torch.ones(3)), (5,)),
    "attention": (attention, lambda n: (rows(n).reshape(1, 2, n, 4),), (6,)),
    "sizes": (views_and_writes, lambda n: (rows(n), torch.ones(3)), (5, 9)),
    "inference": (layers, lambda n: (network(), rows(n)), (5,)),
    "training": (layers, lambda n: (network(), rows(n)), (5, 7)),
}


def save(name: str, folder: Path) -> None:
    fn, make, sizes = CASES[name]
    args = make(sizes[0])
    with torch.set_grad_enabled(name == "training"):
        run: Any = torch.compile(fn, backend="lenz", fullgraph=True, dynamic=len(sizes) > 1)
        made = run.aot_compile((args, {}))
        same(name, made, sizes[0])
    made.save_compiled_function(str(folder / name))


def same(name: str, run: Callable[..., Any], n: int) -> None:
    """Results, what is written and gradients are eager's."""
    fn, make, _ = CASES[name]
    ours, theirs = make(n), make(n)
    with torch.set_grad_enabled(name == "training"):
        got, want = run(*ours), fn(*theirs)
        if name == "training":
            got.backward()
            want.backward()
    torch.testing.assert_close(got, want)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b)
        else:
            grads = [[p.grad for p in m.parameters()] for m in (a, b)]
            assert all(g is not None for g in grads[0]) == (name == "training")
            torch.testing.assert_close(*grads)


def load(folder: Path) -> None:
    """Run what another process saved; with a state or sizes that torch refuses, it raises."""
    assert LOAD is not None
    for name, (_, make, sizes) in CASES.items():
        with open(folder / name, "rb") as file:
            run = LOAD(file)
        for n in sizes:
            same(name, run, n)
        if len(sizes) == 1:
            with pytest.raises(RuntimeError, match="GuardManager"), torch.no_grad():
                run(*make(sizes[0] + 2))
    assert not torch._dynamo.utils.counters["frames"], "nothing is traced"


def test_what_one_process_saves_another_runs(tmp_path: Path) -> None:
    for name in CASES:
        torch._dynamo.reset()
        save(name, tmp_path)
    code = f"import pathlib, tests.e2e.test_saved as t; t.load(pathlib.Path({str(tmp_path)!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_what_is_loaded_can_be_saved_again(tmp_path: Path) -> None:
    assert LOAD is not None
    save("pointwise", tmp_path)
    with open(tmp_path / "pointwise", "rb") as file:
        run: Any = LOAD(file)
    run.save_compiled_function(str(tmp_path / "again"))
    with open(tmp_path / "again", "rb") as file:
        same("pointwise", LOAD(file), 5)


def of_this_file(x: Tensor) -> Tensor:
    return x * 2


def test_a_graph_that_cannot_be_saved_says_so(tmp_path: Path) -> None:
    """A function that torch has no name for, and arguments that share memory."""
    twice = torch.compiler.allow_in_graph(of_this_file)

    def added(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(1) + y

    base = torch.ones(5)
    for f, args in ((lambda x: twice(x).sin(), (base,)), (added, (base[1:], base[:-1]))):
        want = f(*(a.clone() for a in args))
        run: Any = torch.compile(f, backend="lenz", fullgraph=True)
        made = run.aot_compile((args, {}))
        if len(args) == 1:
            torch.testing.assert_close(made(*args), want)
        with pytest.raises(UserError, match="cannot be saved"):
            made.save_compiled_function(str(tmp_path / "x"))
