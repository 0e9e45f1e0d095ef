"""A model in eager, in lenz and in float64: how far the first two are from the third.

A reference in float64 is what a model would give without rounding: also where the model itself asks
for float32 (norms and rotary positions of decoders do), it gets float64.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lenz.options import Options
from lenz.page.explainer import Explainer
from lenz.page.report import Report
from tests.models.architectures import Unbuilt
from tests.models.example import Example
from tests.models.families import example

STEPS, RATE, DRAWS = 3, 0.01, 4
# Where one comparison looks bad, so many decide by the geometric mean: the ratio of the two errors
# in CLIP's gradients is 2.5 in one draw on one machine, and 0.97 over eight.
ENOUGH = 8
LEAST = 0.1  # of what is allowed: a draw that happens to be exact counts no more than this
# lenz may be that much farther from float64 than eager, and ROUNDING beyond (relative): sums in
# another order are as good, but not equal.  One tensor alone, which may be small, may be WORSE.
TIMES, WORSE = 1.5, 4.0
ROUNDING = {torch.float32: 1e-7, torch.bfloat16: 2**-9}
SMALL = 0.1  # a tensor below this part of the root mean square of all is as good as zero


@dataclass(frozen=True, slots=True)
class Sides:
    """Named results of each side, and what lenz made; `report` is of the calls compared."""

    exact: dict[str, Tensor]
    eager: dict[str, Tensor]
    lenz: dict[str, Tensor]
    report: Report
    breaks: dict[str, int]  # reason of a graph break -> how often
    dtype: torch.dtype

    @property
    def errors(self) -> tuple[float, float]:
        """Errors of eager and of lenz: root mean squares of all tensors' relative distances."""
        parts = [self.distances(name) for name in self.exact]
        eager, lenz = (sum(p[side] ** 2 for p in parts) for side in (0, 1))
        return (eager / max(1, len(parts))) ** 0.5, (lenz / max(1, len(parts))) ** 0.5

    def distances(self, name: str) -> tuple[float, float]:
        """How far eager's and lenz's tensor is from the exact one, relative to its size.

        What should be zero (the gradient of a key's bias, say) is measured by its like.
        """
        exact, kind = self.exact[name], name.split()[0]
        like = [t for n, t in self.exact.items() if n.split()[0] == kind]
        usual = (sum(_norm(t) ** 2 for t in like) / max(1, sum(t.numel() for t in like))) ** 0.5
        size = max(_norm(exact), SMALL * usual * exact.numel() ** 0.5) or 1.0
        eager, lenz = (_norm(side[name].double() - exact) for side in (self.eager, self.lenz))
        return eager / size, lenz / size

    @property
    def skips(self) -> list[str]:
        """Why graphs run without lenz."""
        return [why for g in self.report.graphs for why in g.skips]

    def excess(self) -> dict[str, tuple[float, float, float]]:
        """Errors of eager and of lenz, and the latter as a part of what is allowed."""
        floor = ROUNDING[self.dtype]
        eager, lenz = self.errors
        found = {"all results": (eager, lenz, lenz / (TIMES * eager + floor))}
        for name in self.exact:
            theirs, ours = self.distances(name)
            found[name] = (theirs, ours, ours / (WORSE * theirs + 20 * floor))
        return found

    def faults(self, *others: Sides) -> list[str]:
        """What is wrong, by these and other draws; empty when lenz is as good as eager."""
        found, rest = [], [o.excess() for o in others]
        for name, (eager, lenz, part) in self.excess().items():
            parts = [part, *(r[name][2] for r in rest)]
            if not (mean := geometric(parts)) <= 1:
                over = f"; over {len(parts)} draws {mean:.2f} of what is allowed" if rest else ""
                found.append(f"{name}: error {lenz:.2e}, eager's is {eager:.2e}{over}")
        for name, want in self.eager.items():
            if self.lenz[name].dtype is not want.dtype or self.lenz[name].shape != want.shape:
                found.append(f"{name}: {self.lenz[name].dtype} {tuple(self.lenz[name].shape)}")
        return found


def geometric(parts: Sequence[float]) -> float:
    """The geometric mean of parts, each at least LEAST; nan if one is."""
    logs = [math.log(LEAST if p < LEAST else p) for p in parts]
    return math.exp(sum(logs) / len(logs))


def judge(name: str, kind: str, device: str = "cpu") -> tuple[Sides, list[str]]:
    """Compare a model; gives what is wrong as well, which ENOUGH draws decide."""
    sides = compare(name, kind, device)
    if not sides.faults():
        return sides, []
    return sides, sides.faults(*(compare(name, kind, device, draw=k) for k in range(1, ENOUGH)))


def compare(
    name: str, kind: str, device: str = "cpu", dynamic: bool | None = None, draw: int = 0,
    backend: str = "",
) -> Sides:  # fmt: skip
    """Run the model called `name` on all sides; `kind` is one of `families.kinds`.

    `dynamic` is torch.compile's; `draw` numbers the draws of weights and inputs; `backend` stands
    in lenz's place. Raises Unbuilt.
    """
    dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32
    run = _infer if kind.startswith("inference") else _train
    count = DRAWS if run is _infer else 1
    seeds = range(draw * count, (draw + 1) * count)
    try:
        made = [_cast(example(name, seed), dtype, device) for seed in seeds]
        with in_double():
            exact = run([_cast(m, torch.float64, device) for m in made], lambda fn: fn)
        if kind.endswith("autocast"):
            dtype, made = torch.bfloat16, [_autocast(m, device) for m in made]
        eager = run(made, lambda fn: fn)
    except Exception as e:
        raise Unbuilt(f"{name} does not run in eager: {e}") from e
    seen = Explainer()
    torch._dynamo.reset()
    counters["graph_break"].clear()
    options = Options.from_environment({"on_error": "raise"})
    with warnings.catch_warnings(), torch._dynamo.config.patch(**made[0].dynamo):
        warnings.simplefilter("ignore")
        used = backend or seen.backend(options)
        compiled = run(made, lambda fn: torch.compile(fn, backend=used, dynamic=dynamic))
    double = {k: t.double() for k, t in exact.items()}
    breaks = {why.split("\n")[0]: n for why, n in counters["graph_break"].items()}
    return Sides(double, eager, compiled, seen.report(), breaks, dtype)


def _infer(draws: list[Example], compile: Callable[..., Any]) -> dict[str, Tensor]:
    """The results in evaluation mode, for several draws of weights and inputs.

    A result may have few elements, and the error of one draw says little.
    """
    module = _warm(draws[0])
    forward = compile(draws[0].forward)
    found: dict[str, Tensor] = {}
    for draw, made in enumerate(draws):
        module.load_state_dict(made.module.state_dict())
        with torch.no_grad():
            results = pytree.tree_leaves(forward(module, *made.inputs))
        tensors = [t.clone() for t in results if isinstance(t, Tensor)]
        found |= {f"result {k} of draw {draw}": t for k, t in enumerate(tensors)}
    return found


def _train(draws: list[Example], compile: Callable[..., Any]) -> dict[str, Tensor]:
    """Loss, gradients and running statistics of a step; loss and weights after STEPS of SGD."""
    made = draws[0]
    module = _warm(made).train()

    def loss_of(module: nn.Module, *inputs: Tensor) -> Tensor:
        return made.loss(made.forward(module, *inputs), *inputs)

    step = compile(loss_of)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    found: dict[str, Tensor] = {}
    for k in range(STEPS):
        optimizer.zero_grad()
        loss = step(module, *made.inputs)
        loss.backward()
        found[f"loss {k}"] = loss.detach().clone()
        if k == 0:
            found |= {
                f"gradient of {n}": p.grad.clone()
                for n, p in module.named_parameters()
                if p.grad is not None
            }
            found |= {
                f"buffer {n}": b.clone() for n, b in module.named_buffers() if b.is_floating_point()
            }
        optimizer.step()
    return found | {f"weight {n}": p.detach().clone() for n, p in module.named_parameters()}


def _warm(made: Example) -> nn.Module:
    """A copy that was called once: models of transformers install hooks then, under a lock."""
    module = deepcopy(made.module).eval()
    with torch.no_grad():
        made.forward(module, *made.inputs)
    return module


def _cast(made: Example, dtype: torch.dtype, device: str) -> Example:
    """The model and its inputs in another type; whole numbers stay what they are."""
    inputs = tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in made.inputs)
    return replace(made, module=deepcopy(made.module).to(device, dtype), inputs=inputs)


def _autocast(made: Example, device: str) -> Example:
    """The model whose forward pass, and not the loss, runs under autocast to bfloat16."""

    def forward(module: nn.Module, *inputs: Tensor) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return made.forward(module, *inputs)

    return replace(made, forward=forward)


class _Wide(TorchFunctionMode):
    """Gives float64 to whoever asks for float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:  # its memo holds all that was copied so far
            return func(*args, **(kwargs or {}))
        if func is Tensor.float:
            func = Tensor.double
        args, kwargs = pytree.tree_map(_widened, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _widened(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


@contextmanager
def in_double() -> Iterator[None]:
    """Everything that is made in here is made in float64."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(usual)


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t.double()))
