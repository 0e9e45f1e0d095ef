"""A backend changes nothing that it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from lenz.api import backend
from lenz.frontend.capture import prepared
from tests.cuda import Fake, fake_cuda

DERIVED = (
    "_code",
    "_lineno_map",
    "_prologue_start",
)  # from the graph, anew with each module around it

sdpa = F.scaled_dot_product_attention


def state(gm: GraphModule) -> dict[str, Any]:
    """All of a module that a compiler could change, with the objects in it by identity."""
    return {
        "code": gm.code,
        "nodes": [(id(n), n.op, n.target, str((n.args, n.kwargs))) for n in gm.graph.nodes],
        "sources": [getattr(n, "_dynamo_source", None) for n in gm.graph.nodes],
        "meta": [{k: id(v) for k, v in n.meta.items()} for n in gm.graph.nodes],
        "own meta": {k: id(v) for k, v in gm.meta.items()},
        "attributes": {k: id(v) for k, v in vars(gm).items() if k not in DERIVED},
        "tensors": {
            k: (id(v), v._version) for k, v in (*gm.named_parameters(), *gm.named_buffers())
        },
        "bodies": {k: state(m) for k, m in gm.named_children() if isinstance(m, GraphModule)},
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for what, value in before.items():
        if isinstance(value, dict):
            same(value, after[what])
        else:
            assert after[what] == value, f"{what} changed"


def masked(q: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return sdpa(q, q, q, attn_mask=mask) + F.dropout(q, 0.0)


def checkpointed(q: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)
    return checkpoint(lambda q: sdpa(q, q, q, attn_mask=mask).sin(), q, use_reentrant=False)


def branching(q: Tensor) -> Tensor:
    return torch.cond(q.sum() > 0, lambda q: q.sin(), lambda q: q * 2, (q,))


class Layer(nn.Module):
    """With parameters, buffers that are written, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(16, 16)

    def forward(self, q: Tensor) -> Tensor:
        q = self.linear(self.norm(q[0]))[None]
        return masked(q)


PROGRAMS = {
    "attention": masked,
    "checkpoint": checkpointed,
    "branch": branching,
    "layer": Layer(),
    "no attention": lambda q: (q * 2).softmax(-1),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_backend_is_given_stays(name: str, training: bool, dynamic: bool) -> None:
    if name == "checkpoint" and not training:
        pytest.skip("torch refuses attention in a checkpoint without a backward")
    found: list[int] = []

    def custom(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        before, given = state(gm), [*map(id, inputs)]
        run = backend(gm, inputs)
        same(before, state(gm))
        assert [*map(id, inputs)] == given, "the list of inputs changed"
        found.append(len(before["bodies"]))
        return run

    q = torch.randn(1, 2, 8, 16) if name != "layer" else torch.randn(1, 4, 8, 16)
    q.requires_grad_(training)
    f = torch.compile(PROGRAMS[name], backend=custom, fullgraph=True, dynamic=dynamic)  # type: ignore[call-overload]
    got = f(q)
    if training:
        got.sum().backward()
    assert found == [{"checkpoint": 1, "branch": 2}.get(name, 0)]


@pytest.mark.parametrize("program", ["convolution", "attention"])
def test_a_graph_for_cuda_stays_and_its_copy_has_what_dynamo_noted(program: str) -> None:
    found: list[GraphModule] = []

    def custom(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        before = state(gm)
        made = prepared(gm)
        same(before, state(gm))
        made.graph.lint()
        assert made is not gm and made.code != gm.code
        assert made.compile_subgraph_reason is gm.compile_subgraph_reason
        assert made.meta == gm.meta
        for n, m in zip(gm.graph.nodes, made.graph.nodes, strict=False):
            if n.op == "placeholder":
                assert n.name == m.name and n.meta["grapharg"] is m.meta["grapharg"]
        found.append(gm)
        return gm

    torch._dynamo.reset()
    with fake_cuda():
        if program == "convolution":
            f: Any = nn.Conv2d(16, 16, 3, device="cuda", dtype=torch.bfloat16)
            args: Any = (Fake((2, 16, 8, 8)).make(),)
        else:
            f, args = sdpa, [Fake((1, 2, 8, 17)).make() for _ in range(3)]
        torch.compile(f, backend=custom, fullgraph=True)(*args)
    assert found
