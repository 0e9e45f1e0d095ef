"""A plan with its kernels is complete: another process runs it and compiles nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lenz import pipeline, recall
from lenz.errors import Unsupported
from lenz.frontend import FxProgram
from lenz.frontend.capture import capture
from lenz.ir.plan import Boxed, CallStep, Plan
from lenz.ir.printer import show
from lenz.lower import native_ops
from lenz.options import Options
from lenz.runtime.store import store_in
from tests.fuzz.check import SAVED, copied
from tests.fuzz.generator import program
from tests.fuzz.program import analyse
from tests.models.families import MODELS, example

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]
PLAIN = (Tensor, bool, int, float, type(None))


class Alone:
    """The other process, and a backend whose calls run there first."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "case"
        self.options = Options(cache_dir=str(folder / "cache"), on_error="raise")
        self.ran = 0
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.plan.alone"], cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def backend(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture(gm, inputs, self.compile_fx, self.options, native_ops())

    def compile_fx(self, p: FxProgram) -> Boxed:
        """The callable of a program, which compares each call with one of the other process."""
        try:
            made = pipeline.compile_program(p, recall.context(self.options))
        except Unsupported:
            return p.eager()
        plan, constants = made.complete
        store = store_in(self.options)
        for name, data in constants.items():
            store.put("constant", name, data)
        case = {"plan": show(plan), "keys": made.entry.keys, "store": self.options.cache_dir}

        def run(args: list[Any]) -> Sequence[Any]:
            if not is_told(made.plan) or not all(isinstance(a, PLAIN) for a in args):
                return made.call(args)
            mine, random = [*args], torch.get_rng_state()
            self.answer({**case, "random": random}, copied(args))
            want = made.call(args)
            for k, y in enumerate((*want, *mine)):
                x = torch.load(f"{self.path}.{k}", weights_only=True)
                same(x, y, f"value {k} of\n{case['plan']}")
            return want

        told: Any = run
        told.strides = made.strides
        return told  # type: ignore[no-any-return]  # an Any, since it has an attribute

    def answer(self, case: dict[str, Any], args: list[Any]) -> None:
        """Have the other process run a call."""
        torch.save({**case, "count": len(args)}, self.path)
        for k, a in enumerate(args):
            torch.save(a, f"{self.path}.{k}")
        print(self.path, file=self.child.stdin, flush=True)
        said = json.loads(self.child.stdout.readline())
        assert not said["error"], f"{said['error']}\n{case['plan']}"
        assert not said["imported"]
        self.ran += 1

    def call(self, fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Any:
        torch._dynamo.reset()
        return torch.compile(fn, backend=self.backend, dynamic=dynamic)(*args)


def is_told(p: Plan) -> bool:
    """False for a plan that calls objects or ops of the user's program, which no text holds."""
    calls = [s.op for s in p.steps if isinstance(s, CallStep)]
    return not p.objects and not any(op.startswith("fuzz.") for op in calls)


def same(x: Any, y: Any, message: str) -> None:
    """The same code computed both, so that they are equal to the last bit."""
    if not isinstance(y, Tensor):
        assert x == y or x != x, message
        return
    assert x.stride() == y.stride(), message
    torch.testing.assert_close(
        x, y, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{m}\n{message}"
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    found = Alone(tmp_path_factory.mktemp("alone"))
    yield found
    found.child.stdin.close()
    assert found.child.wait(60) == 0


def attention(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1) + x.sum(0)


def written(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    w.mul_(2)
    return F.dropout(x, 0.5), w[1:] + 0, x.topk(2).values


def known(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + w.to(torch.float16)[::2].sum()


def trained(x: Tensor, w: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    return torch.autograd.grad(F.gelu(x @ w).square().sum(), w)[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [attention, written, known, trained])
def test_plans_run_where_nothing_compiles(
    alone: Alone, fn: Callable[..., Any], dynamic: bool
) -> None:
    before = alone.ran
    alone.call(fn, torch.randn(4, 4), torch.randn(4, 4), dynamic=dynamic)
    assert alone.ran > before


def test_another_result_is_found(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "copied", lambda args: [a + 1 for a in args])
    with pytest.raises(AssertionError, match="value 0 of"):
        alone.call(attention, torch.randn(4, 4), torch.randn(4, 4))


def random_program(alone: Alone, seed: int) -> None:
    p = program(seed)
    if analyse(p) is None:
        return
    try:
        p.function()(*p.arguments())
    except Exception:  # noqa: BLE001  # not a program
        return
    args = p.arguments()
    with getattr(torch, p.mode)() if p.mode else warnings.catch_warnings():
        results = alone.call(p.function(), *args, dynamic=p.dynamic or None)
    outs = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if outs:
        try:
            sum(x.sum() for x in outs).backward()
        except RuntimeError as e:
            if not f"RuntimeError: {e}".startswith(SAVED):
                raise


@pytest.mark.one_in(20)
@pytest.mark.parametrize("first", range(0, 200, 5))
def test_random_programs(alone: Alone, first: int) -> None:
    before = alone.ran
    for seed in range(first, first + 5):
        random_program(alone, seed)
    assert alone.ran > before + 2


@pytest.mark.one_in(60)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_models(alone: Alone, name: str) -> None:
    made, before = example(name), alone.ran
    with torch._dynamo.config.patch(**made.dynamo):
        loss = lambda *inputs: made.loss(made.forward(made.module, *inputs), *inputs)
        if made.trained:
            alone.call(loss, *made.inputs).backward()
        else:
            alone.call(lambda *inputs: made.forward(made.module, *inputs), *made.inputs)
    assert alone.ran > before
