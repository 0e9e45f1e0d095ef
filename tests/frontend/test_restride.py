"""A backward half whose saved tensors have other strides than eager's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lenz.frontend.restride import restride


def traced(f: Any, *args: Tensor) -> Any:
    return make_fx(f, tracing_mode="fake")(*args)


def fake_like(gm: Any, *args: Tensor) -> list[Tensor]:
    """The arguments as fake tensors of the trace's own mode."""
    place = next(n for n in gm.graph.nodes if n.op == "placeholder")
    mode: FakeTensorMode = place.meta["val"].fake_mode
    return [mode.from_tensor(a) for a in args]


def test_results_get_the_strides_that_follow() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b = x.view(2, 2, 5).split(1)
        return torch.mm(x.t(), y), a.sin(), b, x.view(20), y * 2

    x, y = torch.randn(4, 5), torch.randn(4, 3)
    gm = traced(f, x, y)
    wide = torch.zeros(4, 8)[:, :5].copy_(x)
    restride(gm, fake_like(gm, wide, y))
    torch.testing.assert_close(torch.fx.Interpreter(gm).run(wide, y), f(x, y))
    values: dict[str, Any] = {}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            values[n.name] = super().run_node(n)
            return values[n.name]

    Watch(gm).run(wide, y)
    for n in gm.graph.nodes:
        if isinstance(values.get(n.name), Tensor):
            assert n.meta["val"].stride() == values[n.name].stride(), n
    assert "reshape" in gm.print_readable(print_output=False), "a view of padded memory"


def test_equal_strides_change_nothing() -> None:
    x = torch.randn(4, 5)
    gm = traced(lambda x: x.t().exp(), x)
    before = [n.meta["val"] for n in gm.graph.nodes if n.op == "call_function"]
    restride(gm, fake_like(gm, x))
    after = [n.meta["val"] for n in gm.graph.nodes if n.op == "call_function"]
    assert all(a is b for a, b in zip(before, after, strict=True))
