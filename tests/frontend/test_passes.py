"""Passes of the user: they change graphs in order, are part of the key, and errors name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, randn
from torch.fx import GraphModule, Transformer
from torch.fx.passes.infra.pass_base import PassResult

from lenz import keys, pipeline
from lenz.errors import UserError
from lenz.frontend import FxProgram
from lenz.options import Options

aten = torch.ops.aten
HERE = __name__
kinds: list[str] = []


@pytest.fixture(autouse=True)
def no_kinds() -> Iterator[None]:
    """The kinds of graphs that `to_cos` has seen."""
    yield
    kinds.clear()


def to_cos(gm: GraphModule) -> None:
    kinds.append(gm.meta["kind"])
    for n in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
        n.target = aten.cos.default


def times(gm: GraphModule, factor: float = 2.0, dtype: str = "") -> None:
    """Multiply every cosine."""
    for n in gm.graph.find_nodes(op="call_function", target=aten.cos.default):
        with gm.graph.inserting_after(n):
            made = gm.graph.call_function(aten.mul.Tensor, (n, factor))
        n.replace_all_uses_with(made, lambda user: user is not made)
        if dtype:
            with gm.graph.inserting_after(made):
                wide = gm.graph.call_function(
                    aten._to_copy.default, (made,), {"dtype": getattr(torch, dtype)}
                )
            made.replace_all_uses_with(wide, lambda user: user is not wide)


def with_table(gm: GraphModule) -> GraphModule:
    """Add a constant to every cosine, in another module."""
    made = Transformer(gm).transform()
    made.register_buffer("table", torch.arange(4.0))
    for n in made.graph.find_nodes(op="call_function", target=aten.cos.default):
        with made.graph.inserting_after(n):
            table = made.graph.get_attr("table")
        with made.graph.inserting_after(table):
            added = made.graph.call_function(aten.add.Tensor, (n, table))
        n.replace_all_uses_with(added, lambda user: user is not added)
    for old, new in zip(gm.graph.nodes, made.graph.nodes, strict=False):
        if old.op == "placeholder":
            new.meta = old.meta
    return made


def fails(gm: GraphModule) -> None:
    raise LookupError("nothing to do")


def fails_late(gm: GraphModule) -> None:
    if gm.meta["kind"] == "backward":
        raise LookupError("nothing to do")


def drops(gm: GraphModule) -> None:
    output = gm.graph.output_node()
    output.args = ((),)


def of_last(gm: GraphModule) -> None:
    """Take the sine of the last argument, of whatever size and type."""
    (*_, last) = gm.graph.find_nodes(op="placeholder")
    for n in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
        n.args = (last,)


def of_text(gm: GraphModule) -> None:
    for n in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
        n.args = ("x",)


def wrapped(gm: GraphModule) -> PassResult:
    return PassResult(gm, True)


def wave(x: Tensor) -> Tensor:
    return x.sin() + 1


def compiled(*passes: Any, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    given = {"cache": False, "verify": True, **options, "passes": passes}
    return torch.compile(wave, backend="lenz", options=given)


def test_passes_change_the_graph_in_their_order() -> None:
    x = randn(3, 4)
    torch.testing.assert_close(compiled(to_cos)(x), x.cos() + 1)
    torch.testing.assert_close(compiled(to_cos, times)(x), x.cos() * 2 + 1)
    torch.testing.assert_close(compiled(times, to_cos)(x), x.cos() + 1)
    torch.testing.assert_close(compiled(to_cos, with_table)(x), x.cos() + torch.arange(4.0) + 1)
    assert set(kinds) == {"inference"}


def test_passes_have_arguments() -> None:
    x = randn(3, 4)
    got = compiled(to_cos, (times, {"factor": 3.0}), (f"{HERE}:times", {"factor": 0.5}))(x)
    torch.testing.assert_close(got, x.cos() * 3 * 0.5 + 1)


def test_nodes_after_a_new_one_have_its_type() -> None:
    x = randn(3, 4)
    got = compiled(to_cos, (times, {"dtype": "float64"}))(x)
    assert got.dtype is torch.float64
    torch.testing.assert_close(got, (x.cos() * 2).double() + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "dtype"), [(3, torch.float32), (5, torch.float64)])
def test_changed_nodes_have_the_type_of_their_new_operands(n: int, dtype: torch.dtype) -> None:
    """Memory behind a smaller operand was read."""
    last = torch.rand(n, dtype=dtype)
    options: Any = {"passes": [of_last], "cache": False}
    run = torch.compile(lambda x, y: (x.sin() * 2, y * 2), backend="lenz", options=options)
    torch.testing.assert_close(run(torch.rand(5), last), (last.sin() * 2, last * 2))


def test_both_halves_of_a_training_step_go_through_passes() -> None:
    x = randn(4, requires_grad=True)
    y = compiled(to_cos)(x)
    torch.testing.assert_close(y, x.cos() + 1)
    y.sum().backward()
    assert kinds == ["forward", "backward"]
    torch.testing.assert_close(x.grad, x.detach().cos(), msg="the gradient was that of a sine")


def test_passes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENZ_PASSES", f"{HERE}:to_cos,{HERE}:times")
    x = randn(3, 4)
    got = torch.compile(wave, backend="lenz")(x)
    torch.testing.assert_close(got, x.cos() * 2 + 1)
    assert f"{HERE}:to_cos" in Options.from_environment().key()


@pytest.mark.diagonal(2)
@pytest.mark.parametrize(
    ("given", "what"),
    [
        (fails, f"the pass {HERE}:fails failed on the inference graph: LookupError: nothing to do"),
        (drops, "arguments and results were"),
        (of_text, f"the pass {HERE}:of_text failed on the inference graph: "),
        (wrapped, "'PassResult' object has no attribute 'graph'"),
        (f"{HERE}:lost", f"there is no {HERE}:lost"),
        ("no.such:thing", "there is no no.such:thing: No module"),
        (f"{HERE}:HERE", "is a str, no function"),
        (lambda gm: None, "names no function"),
        ("to_cos", "names no function"),
        ((times, {"factor": randn(2)}), f"{HERE}:times gets factor"),
        ((times, 3), f"{HERE}:times gets"),
        ((times, {3: 3}), f"{HERE}:times gets 3=3"),
    ],
)
def test_a_failing_pass_is_named(given: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        compiled(given, on_error="eager")(randn(3))


def test_a_pass_that_fails_on_a_backward_graph_is_named() -> None:
    x = randn(3, requires_grad=True)
    with pytest.raises(UserError, match="fails_late failed on the backward graph"):
        compiled(fails_late)(x).sum().backward()


def test_passes_are_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another pass, other arguments and another version of a pass make another graph."""
    monkeypatch.setattr(keys, "sources", lambda again=False: "one version")
    made: list[str] = []
    before = pipeline.compile_program

    def counted(program: FxProgram, *rest: Any) -> Any:
        made.append(program.kind)
        return before(program, *rest)

    monkeypatch.setattr(pipeline, "compile_program", counted)
    x, how = randn(3, 4), {"cache": True, "verify": False, "cache_dir": str(tmp_path)}
    lists: list[Any] = [(), (to_cos,), (to_cos, times), (to_cos, (times, {"factor": 3}))]
    for count, passes in enumerate(lists):
        first = compiled(*passes, **how)(x)
        assert len(made) == count + 1
        torch.testing.assert_close(compiled(*passes, **how)(x), first)
        assert len(made) == count + 1, "not found again"
    monkeypatch.setattr("tests.frontend.test_passes.to_cos", times)
    torch.testing.assert_close(compiled(f"{HERE}:to_cos", **how)(x), wave(x))
    assert len(made) == 5, "an old version of the pass was found"
