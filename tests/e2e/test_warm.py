"""The warm start: what another process has compiled is not traced again, and is right."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

from lenz import keys, machines, pipeline, warm
from lenz.frontend.capture import capture
from lenz.runtime.store import Store
from tests import children
from tests.arch.source import REPOSITORY

Compiled = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cache of its own.  The sources count as unchanged, though somebody may be at work there."""
    monkeypatch.setattr(keys, "sources", lambda again=False: "one version")
    yield str(tmp_path / "cache")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An item for each graph that AOTAutograd traces."""
    found: list[int] = []

    def counted(*args: Any, **how: Any) -> Any:
        found.append(1)
        return capture(*args, **how)

    monkeypatch.setattr("lenz.frontend.capture.capture", counted)
    return found


def fresh(fn: Compiled, folder: str, dynamic: bool | None = None, **options: Any) -> Compiled:
    """The function as another process would compile it."""
    torch._dynamo.reset()
    given = {"cache_dir": folder, **options}
    return torch.compile(fn, backend="lenz", dynamic=dynamic, options=given)


class Trained(nn.Module):
    """Batch statistics, a tied weight, a residual, a result that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head.weight = self.mix.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.gelu(self.norm(self.conv(x))).mean((2, 3))
        y = y + self.head(torch.relu(self.mix(y)))
        return y, y.argmax(-1)


def step(run: Compiled, model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y, k = run(x)
    y.square().mean().backward()
    return [y, k, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_training_step_is_not_traced_again(folder: str, traced: list[int]) -> None:
    torch.manual_seed(0)
    model, x = Trained(), randn(4, 3, 8, 8)
    want = None
    for k in range(3):
        twin = Trained()
        twin.load_state_dict(model.state_dict())
        run = twin if k == 0 else fresh(twin, folder)
        got = [step(run, twin, x * n) for n in (1, 2)]
        buffers = [b.clone() for b in twin.buffers()]
        want = want or (got, buffers)
        same((got, buffers), want)
    assert len(traced) == 1


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("grad", [False, True])
def test_sizes_that_change_are_not_traced_again(
    folder: str, traced: list[int], grad: bool, graphs: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    counts = []
    for _ in range(2):
        run = fresh(model, folder, cuda_graphs=graphs)
        for n in (5, 6, 7, 300):
            x = randn(n, 8)
            with nullcontext() if grad else torch.no_grad():
                y = run(x)
            same(y, model(x))
            if grad:
                y.sum().backward()
        counts.append(len(traced))
    assert counts[1] == counts[0] == 2  # one size, then all


def test_a_backward_half_that_nobody_has_run_yet(folder: str, traced: list[int]) -> None:
    w = randn(4, 4, requires_grad=True)
    fn = lambda x: (x @ w).softmax(-1)
    x, counts = randn(3, 4), []
    for back in (False, True, True):
        w.grad = None
        y = fresh(fn, folder)(x)
        if back:
            y[0, 0].backward()
            want = torch.autograd.grad(fn(x)[0, 0], w)[0]
            same(w.grad, want)
        counts.append(len(traced))
    assert counts == [1, 2, 2]  # the second traces when the gradient is asked for


def test_a_late_backward_half_is_traced_as_the_forward_half_was(folder: str) -> None:
    fn, x = lambda x: (x * torch.ones(3)).exp(), torch.arange(3.0, requires_grad=True)
    fresh(fn, folder)(x)
    y = fresh(fn, folder)(x)
    torch.set_default_dtype(torch.float64)
    try:
        y.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    same(x.grad, x.detach().exp())


def test_floats_are_constants_in_other_processes_too(folder: str, traced: list[int]) -> None:
    norm, x, counts = nn.LayerNorm(8), randn(3, 8), list[int]()
    f = lambda x, low, slope, by: F.leaky_relu(norm(x).clamp(min=low), slope) * by
    for _ in range(3):
        norm.zero_grad()
        y = (run := fresh(f, folder, dynamic=True))(x, -0.5, 0.2, 1.5)
        y.square().sum().backward()
        want = torch.autograd.grad(f(x, -0.5, 0.2, 1.5).square().sum(), norm.weight)[0]
        same((y, norm.weight.grad), (f(x, -0.5, 0.2, 1.5), want))
        counts.append(len(traced))
    assert counts == [2, 2, 2]  # the first traces again, without the bound and the slope
    for numbers in ((0.25, 0.2, 1.5), (0.25, 0.2, 0.5), (0.25, 0.1, 0.5)):
        same(run(x, *numbers), f(x, *numbers))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_fallback_is_of_the_same_program(
    folder: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is traced again, for a call that breaks an assumption, has the keys of the first."""
    torch.manual_seed(0)
    model, found = Trained(), list[warm.TraceRecord]()
    real = warm.TraceRecord.load

    def load(self: warm.TraceRecord, *args: Any) -> Any:
        found.append(self)
        return real(self, *args)

    monkeypatch.setattr(warm.TraceRecord, "load", load)
    for _ in range(2):
        step(fresh(model, folder, dynamic=dynamic), model, randn(4, 3, 8, 8))
    first, second = found
    second._again()
    made = second._programs
    assert {k: keys.key_of(p, second.cx) for k, p in made.items()} == {
        k: half["key"] for k, half in first.halves.items()
    }


def test_compiled_autograd_gets_the_backward_graph(folder: str) -> None:
    linear = nn.Linear(4, 4)
    x = randn(3, 4)
    want = torch.autograd.grad(linear(x).tanh().sum(), linear.weight)[0]
    for _ in range(2):
        linear.zero_grad()
        run = fresh(lambda x: linear(x).tanh(), folder)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            run(x).sum().backward()
        same(linear.weight.grad, want)


def test_compiled_autograd_by_lenz_is_right_again(folder: str) -> None:
    """It passes its arguments as a list, which capture flattens."""
    linear, x = nn.Linear(4, 4), randn(3, 4)
    want = torch.autograd.grad(linear(x).tanh().sum(), linear.weight)[0]
    for _ in range(2):
        torch._dynamo.reset()
        linear.zero_grad()
        again = torch.compile(backend="lenz", options={"cache_dir": folder})
        with torch._dynamo.compiled_autograd._enable(again):
            linear(x).tanh().sum().backward()
        same(linear.weight.grad, want)


def test_guards_of_the_trace_hold_again(folder: str, traced: list[int]) -> None:
    """A size that tracing specialises is one that the warm graph is for as well."""

    def fn(x: Tensor) -> Tensor:
        return x.view(-1, 4).softmax(0) + x.shape[0]

    for _ in range(2):
        run = fresh(fn, folder, dynamic=True)
        for n in (8, 12, 24):
            same(run(torch.arange(float(n))), fn(torch.arange(float(n))))
        with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError)):
            run(torch.arange(9.0))


def test_what_the_trace_depends_on_is_traced_again(folder: str, traced: list[int]) -> None:
    linear = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        return F.dropout(linear(x), 0.5, training=linear.training).relu()

    x = randn(3, 4)
    ways: list[Callable[[], Any]] = [
        lambda: fresh(fn, folder)(x),
        lambda: fresh(fn, folder)(x.double().float()),  # the same
        lambda: fresh(fn, folder)(randn(5, 4)),
        lambda: fresh(fn, folder)(randn(4, 3).t()),
        lambda: fresh(fn, folder)(x.clone().requires_grad_()),
        lambda: fresh(fn, folder)(x.clone().requires_grad_() * 1),  # no leaf
        lambda: torch.no_grad()(lambda: fresh(fn, folder)(x))(),
        lambda: torch.inference_mode()(lambda: fresh(fn, folder)(x))(),
        lambda: torch.autocast("cpu", torch.bfloat16)(lambda: fresh(fn, folder)(x))(),
        lambda: (linear.eval(), fresh(fn, folder)(x)),
        lambda: (linear.requires_grad_(False), fresh(fn, folder)(x)),
        lambda: fresh(fn, folder, emulate_rounding=True)(x),
    ]
    new = []
    for way in ways:
        before = len(traced)
        way()
        new.append(len(traced) - before)
    # The second is the first again; Dynamo leaves inference mode before it calls a backend.
    assert new == [1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1]


def test_models_that_share_a_frame_get_their_own_graphs(folder: str) -> None:
    """Two modules of one class differ in what a trace reads of them: activation and width."""

    class Layer(nn.Module):
        def __init__(self, act: Compiled, n: int) -> None:
            super().__init__()
            self.act, self.linear = act, nn.Linear(4, n)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.linear(x)) * self.linear.out_features

    x = randn(3, 4)
    for _ in range(2):
        for act, n in ((torch.relu, 4), (torch.tanh, 4), (torch.relu, 8)):
            layer = Layer(act, n)
            same(fresh(layer, folder)(x), layer(x))


def test_aliases_and_writes_are_eagers(folder: str, traced: list[int]) -> None:
    def views(x: Tensor, y: Tensor) -> Any:
        y.mul_(2)
        z = x.exp()
        return x[1:], x, z, z.t(), y + 1

    def resized(x: Tensor, y: Tensor) -> Any:
        return x.unsqueeze_(0) + y

    def shared(x: Tensor, y: Tensor) -> Any:
        y.add_(1)
        return x * 2

    for fn in (views, resized, shared):
        for _ in range(3):
            told = []
            for run in (fn, fresh(fn, folder)):
                base = torch.arange(12.0).view(3, 4)
                x, y = (base[:2], base[1:]) if fn is shared else (base + 0, base * 1)
                out = run(x, y)
                leaves = out if isinstance(out, tuple) else (out,)
                told.append(
                    (leaves, x, y, [t._base is x for t in leaves], [t is x for t in leaves])
                )
            same(told[1][:3], told[0][:3])
            assert told[1][3:] == told[0][3:]
            assert [t.stride() for t in told[1][0]] == [t.stride() for t in told[0][0]]
        if fn is views:
            assert len(traced) == 1, "how a result is a view of an argument is data"


def test_saved_tensors_are_checked_and_freed(folder: str) -> None:
    w = randn(4, 4, requires_grad=True)
    for _ in range(2):
        run = fresh(lambda x: (x @ w).sigmoid(), folder)
        x = randn(3, 4)
        y = run(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        y = run(randn(3, 4))
        y.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
        y = run(randn(3, 4))
        y.sum().backward(retain_graph=True)
        y.sum().backward()


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("damage", ["cut", "other", "halves", "guards", "classes"])
def test_a_damaged_trace_is_traced_again(
    folder: str, traced: list[int], damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.softmax(0) + 1

    fresh(fn, folder, dynamic=True)(randn(5))
    real = Store.get

    def damaged(self: Store, kind: str, key: str) -> bytes | None:
        data = real(self, kind, key)
        if kind != "trace" or data is None:
            return data
        entry = json.loads(data)
        if damage == "cut":
            return data[: len(data) // 2]
        if damage == "other":
            return b"[1, 2]"
        if damage == "halves":
            entry["halves"]["inference"]["key"] = "0" * 64
        if damage == "guards":
            entry["guards"] = ["__import__('os').abort()"]
        if damage == "classes":
            entry["metadata"] = {"class": "Namespace", "state": {}}
        return json.dumps(entry).encode()

    monkeypatch.setattr(Store, "get", damaged)
    x = randn(5)
    same(fresh(fn, folder, dynamic=True)(x), fn(x))
    assert len(traced) == 2


def test_what_has_no_text_is_traced(folder: str, traced: list[int]) -> None:
    @torch.library.custom_op("lenz_test_warm::own", mutates_args=())
    def own(x: Tensor) -> Tensor:
        return x + 1

    own.register_fake(torch.empty_like)
    held = torch.arange(3.0)
    counts = []
    for fn in (
        lambda x: torch.ops.lenz_test_warm.own(x) * 2,
        lambda x: x[x > 0] * 2,
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    ):
        for _ in range(2):
            with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
                same(fresh(fn, folder)(held), fn(held))
            counts.append(len(traced))
    assert counts == [1, 2, 3, 4, 5, 6]


def put(x: Tensor, to: Tensor) -> Tensor:
    x.data = to
    return x + 1


def test_arguments_that_tracing_resizes_are_themselves(folder: str) -> None:
    """Torch's fake `sort(out=...)` makes its results dense, and `.data =` gives another size."""

    def sort(x: Tensor, values: Tensor, places: Tensor) -> Any:
        return torch.sort(x, out=(values, places))

    def sorts(step: int) -> tuple[Tensor, ...]:
        return randn(8), torch.zeros(8 * step)[::step], torch.zeros(8 * step).long()[::step]

    for step in (2, 1, 2):
        args = sorts(step)
        same(fresh(sort, folder)(*args), sort(*args))
    for n in (3, 5, 3):
        same(fresh(put, folder)(torch.zeros(n), torch.arange(4.0)), torch.arange(4.0) + 1)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Starts of the CPU's compiler, which stands in for the compile server of GPUs."""
    found: list[int] = []
    loader = replace(machines.loader_of("cpu"), start=lambda: found.append(1))
    monkeypatch.setitem(machines._HALVES, ("cpu", "loader"), loader)
    return found


def test_a_compile_server_starts_where_something_is_compiled(
    folder: str, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    @torch.library.custom_op("lenz_test_warm::started", mutates_args=())
    def started_op(x: Tensor) -> Tensor:
        return x + 1

    started_op.register_fake(torch.empty_like)
    order: list[int] = []
    real = pipeline.compile_program
    monkeypatch.setattr(
        pipeline, "compile_program", lambda *a: (order.append(len(started)), real(*a))[1]
    )
    w = randn(5, 5, requires_grad=True)
    for fn in (lambda x: (x @ w).sin().sum(), lambda x: torch.ops.lenz_test_warm.started(x) * 2):
        for way in ("compiled", "found"):
            result = fresh(fn, folder)(randn(5))
            if result.requires_grad:
                result.backward()
            assert bool(started) == bool(order) == (way == "compiled")
            assert order[:1] != [0], "it starts first"
            started.clear(), order.clear()
    fresh(fn, folder, cache=False)(randn(5))
    assert order == [2], "before the graph is traced, and before it is lowered"


CHILD = """
import sys, torch, lenz
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
x = torch.randn(5, 6)
run = torch.compile(model, backend="lenz")
run(x).sum().backward()
got = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(x).sum().backward()
for a, p in zip(got, model.parameters()):
    torch.testing.assert_close(a, p.grad)
names = ["lenz.pipeline", "lenz.lower", "lenz.opt", "lenz.schedule", "lenz.ops"]
print([n for n in names if n in sys.modules])
"""


@pytest.mark.slow
def test_another_process_imports_no_compiler(tmp_path: Path) -> None:
    """Neither where all is found, nor where a graph is traced and its halves are found."""
    environment = {**os.environ, "LENZ_CACHE_DIR": str(tmp_path)}
    before: list[str] = []
    for way in ("compiled", "found", "traced"):
        for entry in tmp_path.rglob("*.trace") if way == "traced" else ():
            entry.unlink()
        done = children.run(["-c", CHILD], environment, REPOSITORY)
        assert done.returncode == 0, done.stderr
        plans = sorted(path.name for path in tmp_path.rglob("*.plan"))
        assert plans and plans == (before or plans), "native code is compiled once"
        before = plans
        assert (done.stdout.strip() != "[]") == (way == "compiled"), f"{way}: {done.stdout}"
