"""Whole steps of torch's optimizers, compiled: weights and states beside eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.options import Options
from lenz.page.explainer import Explainer
from lenz.page.report import Report

SHAPES = ((3, 4), (8, 9), (1,), (2, 3, 5), (70, 3))
STEPS = 3
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD Nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": ("Adam", {"lr": 0.1, "weight_decay": 0.01}),
    "Adam AMSGrad": ("Adam", {"lr": 0.1, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.1}),
    "RMSprop": ("RMSprop", {"lr": 0.01}),
    "RMSprop centred": ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    "Adadelta": ("Adadelta", {"lr": 0.5}),
    "NAdam": ("NAdam", {"lr": 0.1}),
    "RAdam": ("RAdam", {"lr": 0.1, "weight_decay": 0.01}),
    "Adamax": ("Adamax", {"lr": 0.1}),
    "ASGD": ("ASGD", {"lr": 0.1}),
    "Rprop": ("Rprop", {"lr": 0.1}),
}


def stepped(name: str, compiled: bool, **kind: bool) -> tuple[list[Tensor], Report]:
    """Weights and states after STEPS steps with other gradients each."""
    torch.manual_seed(0)
    weights = [torch.randn(s, requires_grad=True) for s in SHAPES]
    grads = [[torch.randn(s) for s in SHAPES] for _ in range(STEPS)]
    of, how = CASES[name]
    optimizer = getattr(torch.optim, of)(weights, **how, **kind)
    seen = Explainer()
    options = Options.from_environment({"on_error": "raise"})
    step = (
        torch.compile(optimizer.step, backend=seen.backend(options)) if compiled else optimizer.step
    )
    for given in grads:
        for w, g in zip(weights, given, strict=True):
            w.grad = g
        step()
    found = [w.detach() for w in weights]
    for w in weights:
        state = optimizer.state[w]
        found += [torch.as_tensor(state[k]) for k in sorted(state) if state[k] is not None]
    return found, seen.report()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_a_step_by_lists_is_at_most_two_kernels_per_weight(name: str) -> None:
    want, _ = stepped(name, False, foreach=True)
    got, report = stepped(name, True, foreach=True)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    assert report.graphs
    for g in report.graphs:
        assert not g.skips and not g.externs and not g.ended_by, g
        assert len(g.kernels) <= 2 * len(SHAPES), [k.name for k in g.kernels]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ("SGD momentum", "Adam AMSGrad", "AdamW", "Adagrad"))
def test_torch_keeps_fused_steps_to_itself(name: str) -> None:
    """torch.compile runs `fused=True` in eager: torch tells Dynamo not to trace it."""
    want, _ = stepped(name, False, fused=True)
    got, report = stepped(name, True, fused=True)
    assert not report.graphs
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
@pytest.mark.parametrize(
    "op", (torch._fused_adam_, torch._fused_adamw_), ids=lambda op: op.__name__
)
def test_the_ops_behind_fused_steps(op: Any) -> None:
    """Of the other optimizers' ops torch has no form for fake tensors."""
    how: dict[str, Any] = {
        "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": True, "maximize": False,
        "weight_decay": 0.01,
    }  # fmt: skip

    def run(compile: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        weights, grads, first = ([torch.randn(s) for s in SHAPES] for _ in range(3))
        second, third = ([torch.rand(s) for s in SHAPES] for _ in range(2))
        steps = [torch.tensor(2.0) for _ in SHAPES]
        step = compile(lambda *lists: op(*lists, **how))
        for _ in range(2):
            step(weights, grads, first, second, third, steps)
        return [*weights, *first, *second, *third, *steps]

    got = run(lambda fn: torch.compile(fn, backend="lenz", fullgraph=True))
    torch.testing.assert_close(got, run(lambda fn: fn), rtol=2e-6, atol=2e-6)
