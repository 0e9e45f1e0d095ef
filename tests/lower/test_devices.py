"""Graphs with tensors on several devices: where each loop runs, and what moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.errors import Unsupported
from lenz.frontend import FxProgram
from lenz.ir.dtype import BF16
from lenz.ir.expr import nodes_of
from lenz.ir.graph import Extern, Graph, Pointwise, Reduction, buffers_of, reads_of
from lenz.ir.verify import verify
from lenz.keys import key_of
from lenz.lower import lower, walk
from lenz.options import Options
from lenz.recall import context
from lenz.runtime.executor import resolve, seed, seeds, to_device
from tests.cuda import CX, Fake, cuda_program, cuda_programs

SCALAR = Fake((), torch.float32, "cpu")


def lowered(p: FxProgram, deterministic: bool = False) -> Graph:
    """The graph of a program; no loop of it reads another device than it writes."""
    g = lower(replace(p, deterministic=deterministic), CX)
    verify(g)
    known = buffers_of(g)
    for n in g.nodes:
        if isinstance(n, (Pointwise, Reduction)):
            read = {known[r].type.device for r in reads_of(n)}
            assert read <= {n.out.type.device}, f"%{n.out.name} reads {read}"
    return g


def graph(fn: Callable[..., Any], *args: Any) -> Graph:
    return lowered(cuda_program(fn, *args))


def calls(g: Graph, op: str) -> list[Extern]:
    return [n for n in g.nodes if isinstance(n, Extern) and n.op == op]


def test_a_cuda_graph_names_its_device() -> None:
    g = graph(lambda x: (x.float().exp().sum(1), x + 1), (4, 8))
    assert {b.type.device for b in buffers_of(g).values()} == {"cuda:0"}
    assert not [n for n in g.nodes if isinstance(n, Extern)]


def test_other_devices_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    p = cuda_program(lambda x: x + 1, (4,))
    monkeypatch.setattr(walk, "types", lambda: frozenset({"cpu"}))
    with pytest.raises(Unsupported, match=r"cuda:0: kernels are made for cpu only"):
        lowered(p)


def test_a_scalar_of_the_cpu_is_a_number_beside_a_half() -> None:
    """Torch keeps it in f32 in products and divides by its reciprocal; not so one of the GPU."""
    half, there = Fake((4, 8), torch.bfloat16), Fake((), torch.float32)
    for scalar, is_number in ((SCALAR, True), (there, False)):
        g = graph(lambda x, s: (x * s, x / s), half, scalar)
        for n, name in zip(
            [n for n in g.nodes if isinstance(n, Pointwise)], ("mul", "div"), strict=True
        ):
            found = nodes_of(n.body)
            assert any(e.op.name == "cast" and e.dtype is BF16 for e in found) is not is_number
            top = n.body.args[0]
            assert top.op.name == ("mul" if is_number else name)


def test_a_scalar_of_the_cpu_moves_once() -> None:
    def f(x: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * s, (x + s) / t, torch.where(x > s, x, t)

    g = graph(f, (4, 8), SCALAR, SCALAR)
    moved = calls(g, "lenz.to_device")
    assert [n.args[0].name for n in moved] == ["arg1_1", "arg2_1"]  # type: ignore[union-attr]
    assert [o.type.device for n in moved for o in n.outs] == ["cuda:0"] * 2  # type: ignore[union-attr]


def test_what_stays_on_the_cpu_is_computed_there() -> None:
    g = graph(lambda x, s: (x * (s + 1), s * 2), (4,), SCALAR)
    known = [n.out.type.device for n in g.nodes if isinstance(n, Pointwise)]
    assert sorted(known) == ["cpu", "cpu", "cuda:0"]
    assert len(calls(g, "lenz.to_device")) == 1


def test_copies_to_another_device_are_calls_with_the_right_types() -> None:
    g = graph(
        lambda x, y: ((x * 2).cpu(), y.to(x.device, torch.bfloat16)),
        (4, 8),
        Fake((3,), device="cpu"),
    )
    kinds = [o.type.device for n in calls(g, "aten._to_copy.default") for o in n.outs]  # type: ignore[union-attr]
    assert sorted(kinds) == ["cpu", "cuda:0"]


def test_a_write_from_another_device_is_a_move_and_a_store() -> None:
    def f(x: Tensor, y: Tensor) -> None:
        x.copy_(y)
        y.add_(1)

    g = graph(f, Fake((4, 8)), Fake((8,), torch.float32, "cpu"))
    assert len(calls(g, "lenz.to_device")) == 1
    assert not calls(g, "aten.copy_.default")
    assert len(g.mutations) == 2


def test_pinned_results_are_left_to_eager() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, torch.zeros_like(y, pin_memory=True)

    g = graph(f, (4,), Fake((4,), device="cpu"))
    assert [n.reason for n in g.nodes if isinstance(n, Extern)] == ["pinned memory"]


def test_item_is_a_call() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        g = graph(lambda x: x + x.sum().item(), Fake((4,), torch.int64))
    (call,) = calls(g, "aten._local_scalar_dense.default")
    assert call.args[0] is not None


def test_dropout_draws_its_seed_on_the_device() -> None:
    g = graph(lambda x: torch.nn.functional.dropout(x, 0.5), (64,))
    (call,) = calls(g, "lenz.seed")
    assert [o.type.device for o in call.outs] == ["cuda:0"]  # type: ignore[union-attr]
    assert len(call.args) == 1


def test_what_a_call_draws() -> None:
    """A key is drawn early; torch's own numbers keep their order. Attention may draw nothing."""

    def f(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return torch.poisson(torch.nn.functional.dropout(y.abs(), 0.5))

    for dropout in (0.0, 0.5):
        g = graph(partial(f, dropout=dropout), *[(2, 4, 128, 64)] * 3)
        drawn = [(n.op.split(".")[1], n.draws, n.is_seen) for n in g.nodes if isinstance(n, Extern)]
        assert ("seed", "key", False) in drawn and ("poisson", "numbers", True) in drawn
        ((_, draws, is_seen),) = [x for x in drawn if "attention" in x[0]]
        assert (draws, is_seen) == (("numbers", True) if dropout else ("", False))


def test_attention_is_a_library_call_in_both_halves() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    for kernel in ("flash", "efficient", "cudnn"):
        for p in cuda_programs(f, *[(2, 4, 128, 64)] * 3, grad=True, attention=kernel):
            externs = [n for n in lowered(p).nodes if isinstance(n, Extern)]
            assert [n.reason for n in externs] == ["library"], kernel


def test_the_runtime_moves_and_draws() -> None:
    assert resolve("lenz.to_device") is to_device and resolve("lenz.seed") is seed
    x = to_device(torch.arange(6.0).view(2, 3).t(), torch.device("meta"))
    assert x.is_contiguous() and x.is_meta and x.shape == (3, 2)
    torch.manual_seed(1)
    a = seed()
    torch.manual_seed(1)
    assert torch.equal(a, seed(torch.device("cpu"))) and a.shape == (2,)
    torch.manual_seed(1)
    first, *others = seeds(3, torch.device("cpu"))
    assert torch.equal(a, first) and len(others) == 2 and not torch.equal(*others)


POSITIONS = Fake((5,), torch.int64)
CHANCE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "index_add": (lambda x, i, y: x.index_add(0, i, y), ((9, 4), POSITIONS, (5, 4))),
    "scatter_add": (lambda x, i, y: x.scatter_add(0, i, y), ((9,), POSITIONS, (5,))),
    "index_put": (lambda x, i, y: x.index_put((i,), y, True), ((9,), POSITIONS, (5,))),
    "index_copy": (lambda x, i, y: x.index_copy(0, i, y), ((9,), POSITIONS, (5,))),
}


@pytest.mark.parametrize("name", CHANCE)
def test_what_is_left_to_chance_on_gpus_is_eager_s_if_asked(name: str) -> None:
    """Eager has kernels of a fixed order for some, and raises for others."""
    fn, args = CHANCE[name]
    p = cuda_program(fn, *args, dtype=torch.float32)
    assert not [n for n in lowered(p).nodes if isinstance(n, Extern)]
    g = lowered(p, deterministic=True)
    (call,) = (n for n in g.nodes if isinstance(n, Extern))
    assert call.op.startswith(f"aten.{name}.") and "deterministic" in call.reason


def test_gradients_of_embeddings_are_eager_s_if_asked() -> None:
    def fn(i: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.embedding(i, w) * 2

    # A table of few rows is summed in a fixed order.
    _, backward = cuda_programs(fn, POSITIONS, Fake((9, 4), torch.float32, grad=True))
    assert not [n for n in lowered(backward, deterministic=True).nodes if isinstance(n, Extern)]
    _, backward = cuda_programs(fn, POSITIONS, Fake((999, 4), torch.float32, grad=True))
    (call,) = (n for n in lowered(backward, deterministic=True).nodes if isinstance(n, Extern))
    assert call.op == "aten.embedding_dense_backward.default"


def test_what_has_one_outcome_stays_native_with_deterministic_algorithms() -> None:
    """Sums of integers, extrema, what is written without positions, scans, and loops of CPUs."""
    for scan in (Tensor.cumsum, Tensor.cumprod, Tensor.logcumsumexp):
        p = cuda_program(lambda x, scan=scan: scan(x, 0), (9,), dtype=torch.float32)
        assert not [n for n in lowered(p, deterministic=True).nodes if isinstance(n, Extern)]
    for fn, args in (
        (lambda x, i, y: x.index_add(0, i, y), ((9,), POSITIONS, (5,))),
        (lambda x, i, y: x.scatter_reduce(0, i, y, "amax"), ((9,), POSITIONS, (5,))),
        (lambda x: x.cumsum(0).sum(), ((9,),)),
    ):
        p = cuda_program(fn, *args, dtype=torch.int32)
        assert not [n for n in lowered(p, deterministic=True).nodes if isinstance(n, Extern)]
    for fn, args in CHANCE.values():
        here = [Fake(*((a, torch.float32) if isinstance(a, tuple) else (a.shape, a.dtype)), "cpu")
                for a in args]  # fmt: skip
        p = cuda_program(fn, *here)
        assert not [n for n in lowered(p, deterministic=True).nodes if isinstance(n, Extern)]


def test_deterministic_algorithms_have_compilations_of_their_own() -> None:
    found: list[bool] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(torch.are_deterministic_algorithms_enabled())
        return gm

    torch._dynamo.reset()
    run = torch.compile(lambda x: x + 1, backend=backend)
    cx, keys, modes = context(Options()), [], (False, True, False)
    try:
        for on in modes:
            torch.use_deterministic_algorithms(on)
            run(torch.zeros(3))
        for on in modes:
            torch.use_deterministic_algorithms(on)
            p = cuda_program(lambda x: x + 1, Fake((3,), torch.float32, "cpu"))
            keys.append(key_of(p, cx))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == [False, True]
    assert keys[0] == keys[2] != keys[1]
