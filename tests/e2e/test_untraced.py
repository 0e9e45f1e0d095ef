"""Dynamo traces the user's code, and nothing of lenz: no frame of its files, no plan."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch.utils.checkpoint import checkpoint

import lenz
from lenz.api import backend

ROOM = str(Path(lenz.__file__).parent)


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The frames that Dynamo traces or inlines, of which none is of lenz."""
    found: list[str] = []
    init = InstructionTranslatorBase.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        found.append(f"{self.f_code.co_filename}:{self.f_code.co_name}")

    monkeypatch.setattr(InstructionTranslatorBase, "__init__", noted)
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield found
    assert any(__file__ in f for f in found), "the frames of the test itself are seen"
    assert not [f for f in found if f.startswith((ROOM, "<lenz"))]


def compiled(f: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    return torch.compile(f, backend="lenz", **kwargs)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip


SIZES = (4, 16, 16), (4, 16, 16), (4, 20, 16), (6, 24, 24)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_training_step_in_one_function(dynamic: bool | None) -> None:
    """The backward is compiled and run inside of the step, also anew for other sizes."""
    m, eager = network(), network()
    eager.load_state_dict(m.state_dict())

    def stepping(m: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        opt = torch.optim.AdamW(m.parameters(), lr=1e-4)

        def step(x: Tensor, y: Tensor) -> Tensor:
            opt.zero_grad(set_to_none=True)
            loss = F.cross_entropy(m(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        return step

    step, want = compiled(stepping(m), dynamic=dynamic), stepping(eager)
    for n, h, w in SIZES:
        x, y = torch.randn(n, 3, h, w), torch.randint(0, 4, (n,))
        torch.testing.assert_close(step(x, y), want(x, y), rtol=1e-4, atol=1e-5)


def test_memory_formats_of_a_step() -> None:
    m = network()

    def step(x: Tensor) -> Tensor:
        m(x).sum().backward()
        return x + 1

    run = compiled(step)
    x = torch.randn(4, 3, 16, 16)
    for z in (x, x.to(memory_format=torch.channels_last), torch.randn(4, 3, 20, 16)):
        run(z)


def test_a_backward_that_torch_defers() -> None:
    """With symbolic sizes the backward half is compiled at the first backward pass."""
    f = compiled(lambda x, w: F.gelu(x @ w).sum(), dynamic=True)

    def step(x: Tensor, w: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        f(x, w).backward()
        return w * 2

    w = torch.randn(8, 8, requires_grad=True)
    for n in (3, 5):
        compiled(step)(torch.randn(n, 8), w)


def test_compiled_autograd() -> None:
    m = network()

    def step(x: Tensor) -> Tensor:
        loss = m(x).sum()
        loss.backward()
        return loss.detach()

    with torch._dynamo.config.patch(compiled_autograd=True):
        for n in (2, 3):
            compiled(step)(torch.randn(n, 3, 8, 8))


def test_a_plan_that_is_made_in_a_call() -> None:
    """A call breaks what the plan takes sizes to be; forward and backward are compiled anew."""
    f = compiled(lambda x, w: (x.softmax(-1) * w).sum(-1), dynamic=True)

    def step(x: Tensor, w: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        f(x, w).sum().backward()
        return x + 1

    run = compiled(step, dynamic=True)
    for n in (64, 128, 37, 4097):
        w = torch.randn(n, requires_grad=True)
        run(torch.randn(3, n), w)


def test_hooks_and_callbacks_of_the_engine() -> None:
    """Hooks of tensors and modules, and what the engine calls at the end, call compiled code."""
    m, seen = nn.Linear(4, 4), []
    square = compiled(lambda g: g * g)

    def last() -> None:
        seen.append(square(torch.ones(3)))

    def hook(g: Tensor) -> Tensor:
        torch.autograd.Variable._execution_engine.queue_callback(last)
        return square(g)

    m.register_full_backward_hook(lambda mod, gi, go: seen.append(square(go[0])))  # type: ignore[index]

    def step(x: Tensor) -> Tensor:
        y = m(x)
        torch._dynamo.graph_break()
        y.register_hook(hook)
        y.sum().backward()
        return x + 1

    for n in (2, 3):
        compiled(step)(torch.randn(n, 4))
    assert len(seen) == 4


def test_hooks_on_saved_tensors() -> None:
    double = compiled(lambda t: t * 2)

    def step(x: Tensor, w: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: double(t), lambda t: t / 2):
            torch._dynamo.graph_break()
            y = (x * w).sin()
        y.sum().backward()
        return y.detach()

    w = torch.randn(4, requires_grad=True)
    compiled(step)(torch.randn(4), w)


def test_a_checkpoint_recomputed_in_the_backward() -> None:
    m = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        y = checkpoint(lambda x: m(x).relu(), x, use_reentrant=False)
        torch._dynamo.graph_break()
        assert isinstance(y, Tensor)
        y.sum().backward()
        return y.detach()

    for n in (2, 3):
        compiled(step)(torch.randn(n, 4))


def test_the_explained(traced: list[str]) -> None:
    """Functions and modules, also from inside of a compiled function."""
    m = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert lenz.explain(m)(torch.randn(2, 4)).launches
    assert lenz.explain(m.forward)(torch.randn(2, 4)).launches

    def outer(x: Tensor) -> Tensor:
        y = x + 1
        report = lenz.explain(lambda x: x * 2)(y)
        return y * len(report.launches)

    compiled(outer)(torch.randn(4))


def test_what_a_custom_backend_got_from_lenz() -> None:
    def own(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        run = backend(gm, inputs)
        return lambda *args: run(*args)

    def step(x: Tensor, w: Tensor) -> Tensor:
        (x * w).sin().sum().backward()
        return x + 1

    torch.compile(step, backend=own)(torch.randn(4), torch.randn(4, requires_grad=True))


def test_finalizers() -> None:
    """A compiled graph dies inside of a compiled function."""
    held: list[Any] = [torch.compile(lambda x: x.exp() + 1, backend="lenz")]
    held[0](torch.randn(40))

    def drop(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        held.clear()
        gc.collect()
        return x + 1

    compiled(drop)(torch.randn(4))


def test_a_graph_that_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    from lenz import pipeline
    from lenz.errors import Unsupported

    def refuse(*args: Any) -> Any:
        raise Unsupported("nothing is supported here")

    monkeypatch.setattr(pipeline, "compile_program", refuse)

    def step(x: Tensor, w: Tensor) -> Tensor:
        (x * w).cos().sum().backward()
        return x + 1

    with pytest.warns(UserWarning, match="runs a graph in eager"):
        compiled(step)(torch.randn(4), torch.randn(4, requires_grad=True))
