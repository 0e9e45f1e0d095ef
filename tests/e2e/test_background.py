"""The option `background`: eager's results at once, the same results from kernels later."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, randn

from lenz import keys, machines
from lenz.debug.failing import say
from lenz.first_calls import background
from lenz.first_calls.background import Background, Process, Request
from lenz.respecialise import Compile
from lenz.warm import TraceRecord

if not keys.sources():
    pytest.skip("the files of lenz have changed: nothing is cached", allow_module_level=True)


class Held(Future[str]):
    """What another job says, but only when `ready` asks for it: a test may be slower than that."""

    def __init__(self, job: Future[str]) -> None:
        super().__init__()
        self.job = job


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Background]:
    """The graphs that begin in eager, and stay there until they are `ready`."""
    found: list[Background] = []
    real = Background.__init__

    def noted(
        self: Background, trace: TraceRecord, again: Compile, job: Future[str], name: str
    ) -> None:
        real(self, trace, again, Held(job), name)
        found.append(self)

    monkeypatch.setattr(Background, "__init__", noted)
    return found


def ready(made: list[Background], is_right: bool = True) -> None:
    """Wait until the process has compiled all graphs."""
    assert made
    for b in made:
        if isinstance(job := b._job, Held):
            job.set_result(job.job.result(120))
            assert (job.result() == "") == is_right, job.result()


def switched(made: list[Background]) -> list[bool]:
    """Whether each graph runs kernels now."""
    return [b._made is not None for b in made]


def begun(fn: Callable[..., Any], tmp_path: Path, **more: Any) -> Callable[..., Any]:
    options: dict[str, Any] = {"background": True, "cache": True, "cache_dir": str(tmp_path)}
    return torch.compile(fn, backend="lenz", options={**options, **more})


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_inference_begins_in_eager(
    made: list[Background], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    loader = replace(machines.loader_of("cpu"), start=lambda: started.append(1))
    monkeypatch.setitem(machines._HALVES, ("cpu", "loader"), loader)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax((x @ w).sin(), -1)

    x, w = randn(6, 5), randn(5, 7)
    run = begun(fn, tmp_path)
    assert torch.equal(run(x, w), fn(x, w)) and switched(made) == [False]
    ready(made)
    for _ in range(3):
        close(run(x, w), fn(x, w))
        assert switched(made) == [True]
    assert not started, "the compiler of kernels is the other process's"


class Net(nn.Module):
    """Statistics that each step changes, and a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu().mean((2, 3))
        torch._dynamo.graph_break()
        return self.head(y).tanh()


def test_training_switches_between_steps(made: list[Background], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    other = copy.deepcopy(model)
    run = begun(model, tmp_path)
    for k in range(5):
        if k == 2:
            ready(made)
        x = randn(4, 3, 8, 8)
        for m, call in ((model, run), (other, other)):
            m.zero_grad()
            call(x).square().sum().backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            close(p.grad, q.grad)
        for b, c in zip(model.buffers(), other.buffers(), strict=True):
            close(b, c)
        assert switched(made) == [k >= 2] * 2


def test_a_backward_pass_belongs_to_its_forward_pass(
    made: list[Background], tmp_path: Path
) -> None:
    """The plan takes over between them: the graph of autograd is still eager's."""
    w = randn(5, 5, requires_grad=True)
    run = begun(lambda x: (x @ w).sin().exp(), tmp_path)
    x = randn(3, 5)
    first = run(x).sum()
    ready(made)
    second = run(x).sum()
    assert switched(made) == [True]
    (a,), (b,) = (torch.autograd.grad(loss, w) for loss in (first, second))
    close(a, b)


def test_autocast_and_arguments_that_are_written(made: list[Background], tmp_path: Path) -> None:
    w = randn(5, 5)

    def fn(x: Tensor) -> Tensor:
        x.add_(1)
        return x @ w

    run = begun(fn, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        for k in range(3):
            x, y = (torch.full((3, 5), 0.5) for _ in range(2))
            got, want = run(x), fn(y)
            assert got.dtype is torch.bfloat16 and torch.equal(x, y)
            torch.testing.assert_close(got, want)
            if k == 0:
                ready(made)
    assert switched(made) == [True]


def test_what_autograd_has_made_is_no_leaf(made: list[Background], tmp_path: Path) -> None:
    """A leaf's graph frees what the graph before it needs, in later processes too."""

    def fn(h: Tensor, v: Tensor) -> Tensor:
        return v * 2 + h.detach()

    def gradients(run: Callable[..., Any]) -> list[Tensor]:
        w, v = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        h = w.exp()
        h.sum().backward()
        run(h, v).sum().backward()
        return [w.grad, v.grad]  # type: ignore[list-item]  # both are there

    run = begun(fn, tmp_path)
    gradients(run)
    ready(made)
    close(gradients(run), gradients(fn))
    assert switched(made) == [True]
    torch.compiler.reset()
    close(gradients(begun(fn, tmp_path, background=False)), gradients(fn))


@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_an_argument_with_a_bit_is_compiled_at_once(
    bit: str, made: list[Background], tmp_path: Path
) -> None:
    say.cache_clear()

    def fn(x: Tensor) -> Tensor:
        return x.resolve_conj() if bit == "conj" else x * 2 + 1

    z = randn(4, dtype=torch.complex64).conj()
    x = z if bit == "conj" else z.imag
    with pytest.warns(UserWarning, match="holds conjugated or negated values"):
        run = begun(fn, tmp_path)(x)
    torch.compiler.reset()
    for y in (run, begun(fn, tmp_path, background=False)(x)):
        assert torch.equal(y, fn(x)) and not y.is_conj() and y.data_ptr() != x.data_ptr()
    assert not made


def test_an_empty_part_of_an_empty_tensor(made: list[Background], tmp_path: Path) -> None:
    run, x = begun(lambda x: x.sin().sum(0), tmp_path), torch.empty(0, 100)[:, :5]
    run(x)
    ready(made)
    assert torch.equal(run(x), torch.zeros(5)) and switched(made) == [True]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("why", "given", "dynamic"),
    [
        ("it has dynamic sizes", {}, True),
        ("cannot be taken from the cache", {"cache": False}, None),
    ],
)
def test_what_another_process_cannot_do_is_compiled_at_once(
    why: str, given: dict[str, Any], dynamic: bool | None, made: list[Background], tmp_path: Path
) -> None:
    say.cache_clear()
    options: dict[str, Any] = {"background": True, "cache_dir": str(tmp_path), "cache": True}
    run = torch.compile(
        lambda x: x.sin() + 1, backend="lenz", dynamic=dynamic, options={**options, **given}
    )
    with pytest.warns(UserWarning, match=why):
        close(run(torch.ones(5)), torch.ones(5).sin() + 1)
    assert not made


def test_a_state_that_the_process_cannot_have(
    made: list[Background], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say.cache_clear()
    monkeypatch.setattr(background, "state", lambda: "another")
    run, x = begun(lambda x: x.cos() * 2, tmp_path), randn(4)
    with pytest.warns(
        UserWarning,
        match="stays in eager, .* failed: torch has another state there: .* for another",
    ):
        run(x)  # warns already, if the process is as fast
        ready(made, is_right=False)
        assert torch.equal(run(x), x.cos() * 2)
    assert switched(made) == [False]


def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    process = Process()
    wrong = Request(b"no graph", "key", "g", {"logs": []}, keys.sources(), "", {}, [])
    assert "Error" in process.ask(wrong).result(120)
    server = process._server
    assert server is not None
    server.kill()
    server.wait()
    assert process.ask(wrong).result(120).startswith("the compiling process failed")
    assert "Error" in process.ask(wrong).result(120)
    again: subprocess.Popen[bytes] | None = process._server
    assert again is not None and again.pid != server.pid
    process.close()
    assert again.wait(60) != 0


@pytest.mark.one_in(1)
@pytest.mark.parametrize("most", (None, 40))
def test_a_process_to_which_nobody_listens_ends_quietly(most: int | None) -> None:
    """`most` bytes of a request arrive before the client is gone."""
    wrong = Request(b"no graph", "key", "g", {"logs": []}, "other", "", {}, [])
    command = [sys.executable, "-c", background.CODE, *map(str, sys.path)]
    ends: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **ends) as server:
        assert server.stdin and server.stdout and server.stderr
        server.stdout.close()
        server.stdin.write(wrong.frame()[:most])
        server.stdin.close()
        assert server.wait(120) == 0 and not server.stderr.read()


def test_a_cache_that_was_emptied_means_eager(made: list[Background], tmp_path: Path) -> None:
    say.cache_clear()
    run, x = begun(lambda x: x.exp() - 2, tmp_path), randn(4)
    run(x)
    ready(made)
    for entry in tmp_path.rglob("*.*"):
        entry.unlink()
    with pytest.warns(UserWarning, match="the cache lacks a part of it"):
        assert torch.equal(run(x), x.exp() - 2)
