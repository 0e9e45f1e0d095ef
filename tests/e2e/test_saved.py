"""`aot_compile` of torch: saved in one process, run in another, where nothing is traced."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lenz.artifact import container
from lenz.artifact.saved import Saved
from lenz.errors import UserError
from tests import children
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
    """With an epsilon and a slope that are constants, whatever the sizes."""
    torch.manual_seed(0)
    parts = nn.Linear(8, 16), nn.LayerNorm(16), nn.LeakyReLU(0.3), nn.GELU(), nn.Linear(16, 4)
    return nn.Sequential(*parts)


class Normed(nn.Module):
    """Statistics that each step writes, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.mix(x))
        return made.relu()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed()


def cast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ w).relu() * 2


def replayed(x: Tensor) -> tuple[Tensor, ...]:
    """Results that are views of an argument, of several kinds."""
    return x[1:, None], x.transpose(0, 1).unsqueeze(-1)[2:], x.view(torch.int32)


def rows(n: int, *others: int) -> Tensor:
    return torch.linspace(-2, 2, n * 8 * len(others or (1,))).reshape(n, 8, *others)


# For each program what it is compiled for, and what it is called with after it is loaded.
CASES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], tuple[int, ...]]] = {
    "pointwise": (pointwise, lambda n: (rows(n),), (5,)),
    "views": (views_and_writes, lambda n: (rows(n), torch.ones(3)), (5,)),
    "attention": (attention, lambda n: (rows(n).reshape(1, 2, n, 4),), (6,)),
    "sizes": (views_and_writes, lambda n: (rows(n), torch.ones(3)), (5, 9)),
    "inference": (layers, lambda n: (network(), rows(n)), (5,)),
    "cast": (cast, lambda n: (rows(n), rows(8).contiguous()), (5,)),
    "replayed": (replayed, lambda n: (rows(n),), (5,)),
    "statistics": (layers, lambda n: (normed(), rows(n)), (5,)),
    "training": (layers, lambda n: (network(), rows(n)), (5, 7)),
}


TRAINED = ("training", "statistics")


def save(name: str, folder: Path) -> None:
    fn, make, sizes = CASES[name]
    args = make(sizes[0])
    with torch.set_grad_enabled(name in TRAINED):
        run: Any = torch.compile(fn, backend="lenz", fullgraph=True, dynamic=len(sizes) > 1)
        made = run.aot_compile((args, {}))
        same(name, made, sizes[0])
    made.save_compiled_function(str(folder / name))


def same(name: str, run: Callable[..., Any], n: int) -> None:
    """Results, what is written and gradients are eager's."""
    fn, make, _ = CASES[name]
    ours, theirs = make(n), make(n)
    with torch.set_grad_enabled(name in TRAINED):
        got, want = run(*ours), fn(*theirs)
        if name in TRAINED:
            got.backward()
            want.backward()
    torch.testing.assert_close(got, want)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b)
        else:
            grads = [[p.grad for p in m.parameters()] for m in (a, b)]
            assert all(g is not None for g in grads[0]) == (name in TRAINED)
            torch.testing.assert_close(*grads)


def load(folder: Path) -> None:
    """Run what another process saved; with a state or sizes that torch refuses, it raises."""
    assert LOAD is not None
    for name, (_, make, sizes) in CASES.items():
        with open(folder / name, "rb") as file:
            # Where a float is an argument of the graph, torch's bytecode needs `torch`.
            run = LOAD(file, f_globals={"torch": torch})
        for n in sizes:
            same(name, run, n)
        if len(sizes) == 1:
            with pytest.raises(RuntimeError, match="GuardManager"), torch.no_grad():
                run(*make(sizes[0] + 2))
    assert not torch._dynamo.utils.counters["frames"], "nothing is traced"
    names = ["lenz.api", "lenz.keys", "lenz.pipeline", "lenz.lower", "lenz.ops"]
    assert not [n for n in names if n in sys.modules], "nothing is compiled"


def test_what_one_process_saves_another_runs(tmp_path: Path) -> None:
    for name in CASES:
        torch._dynamo.reset()
        save(name, tmp_path)
    code = f"import pathlib, tests.e2e.test_saved as t; t.load(pathlib.Path({str(tmp_path)!r}))"
    own = {**os.environ, "LENZ_CACHE_DIR": str(tmp_path / "empty")}
    done = children.run(["-c", code], own, REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "empty").exists(), "native code is in the file too"


def test_what_is_loaded_can_be_saved_again(tmp_path: Path) -> None:
    assert LOAD is not None
    save("pointwise", tmp_path)
    with open(tmp_path / "pointwise", "rb") as file:
        run: Any = LOAD(file)
    run.save_compiled_function(str(tmp_path / "again"))
    with open(tmp_path / "again", "rb") as file:
        same("pointwise", LOAD(file), 5)


def part(tmp_path: Path) -> bytes:
    """lenz's part of a file."""
    how: dict[str, Any] = {"cache": False}
    run: Any = torch.compile(pointwise, backend="lenz", fullgraph=True, options=how)
    made = run.aot_compile(((rows(5),), {}))._artifacts.compiled_fn
    return Saved.serialize_compile_artifacts(made)


def test_the_part_of_lenz_is_no_pickle(tmp_path: Path) -> None:
    contents = container.read(part(tmp_path))
    assert contents.manifest["kind"] == "graph" and contents.manifest["halves"]
    for name, data in contents.tensors.items():
        assert data.dtype is torch.uint8
        assert name.partition(".")[0] in ("graph", "object", "constant", "plan"), name


@pytest.mark.diagonal(2)
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"torch": "1.0"}, "was saved for torch 1.0, and this is"),
        ({"lenz": "0.0"}, "was saved for lenz 0.0, and this is"),
        ({"machine": "vax"}, "was saved for machine vax, and this is"),
        ({"features": ["warp"]}, "this CPU lacks warp"),
        ({"devices": {"cpu": "another"}}, "was saved for another, and cpu has"),
        ({"kind": "program"}, "an artifact, but not a graph"),
        ({"metadata": {"class": "Other"}}, "another lenz or torch"),
        ({"halves": {"inference": {}}}, "another lenz or torch"),
    ],
)
def test_another_machine_or_version_is_refused(
    how: dict[str, Any], why: str, tmp_path: Path
) -> None:
    c = container.read(part(tmp_path))
    changed = container.Contents({**c.manifest, **how}, c.tensors)
    with pytest.raises(UserError, match=why):
        Saved.deserialize_compile_artifacts(container.as_bytes(changed))


def test_a_part_that_lacks_code_is_refused(tmp_path: Path) -> None:
    c = container.read(part(tmp_path))
    kept = {name: t for name, t in c.tensors.items() if not name.startswith("object.")}
    data = container.as_bytes(container.Contents(c.manifest, kept))
    with pytest.raises(UserError, match="machine code cannot be loaded"):
        Saved.deserialize_compile_artifacts(data)


def test_mutated_bytes_are_refused_or_right(tmp_path: Path) -> None:
    random.seed(0)
    good, x, refused = part(tmp_path), rows(5), 0
    (want,) = Saved.deserialize_compile_artifacts(good)(x)
    torch.testing.assert_close(want, pointwise(x))
    for _ in range(300):
        data = bytearray(good)
        for _ in range(random.choice((1, 1, 4))):
            at = random.randrange(len(data) - 40)
            if random.random() < 0.6:
                data[at] ^= 1 << random.randrange(8)
            else:
                data[at : at + random.randrange(40)] = random.randbytes(random.randrange(40))
        try:
            run = Saved.deserialize_compile_artifacts(bytes(data))
        except UserError:
            refused += 1
            continue
        assert torch.equal(run(x)[0], want)
    assert refused > 250


@torch.library.custom_op("lenz_test_saved::own", mutates_args=())
def own(x: Tensor) -> Tensor:
    return x + 1


own.register_fake(torch.empty_like)


def of_this_file(x: Tensor) -> Tensor:
    return x * 2


def test_a_graph_that_cannot_be_saved_says_so(tmp_path: Path) -> None:
    """A function that torch has no name for, an op of others, arguments that share memory."""
    twice = torch.compiler.allow_in_graph(of_this_file)

    def added(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(1) + y

    base = torch.ones(5)
    mine = lambda x: torch.ops.lenz_test_saved.own(x) * 2
    for f, args in (
        (lambda x: twice(x).sin(), (base,)),
        (mine, (base,)),
        (added, (base[1:], base[:-1])),
    ):
        want = f(*(a.clone() for a in args))
        run: Any = torch.compile(f, backend="lenz", fullgraph=True)
        made = run.aot_compile((args, {}))
        if len(args) == 1:
            torch.testing.assert_close(made(*args), want)
        with pytest.raises(UserError, match="cannot be saved"):
            made.save_compiled_function(str(tmp_path / "x"))
    run = torch.compile(twice, backend="lenz", fullgraph=True, options={"verify": True})
    made = run.aot_compile(((base,), {}))
    with pytest.raises(UserError, match="passes, launch_groups, verify, fuel and ops of your own"):
        made.save_compiled_function(str(tmp_path / "x"))
