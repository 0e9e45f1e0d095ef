"""A program's text: the same for the same program, another for every fact that code depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.frontend import Binding, FxProgram, Output, Placeholder
from lenz.frontend.capture import capture
from lenz.frontend.identity import IdentityText, identity
from lenz.lower import native_ops
from lenz.options import Options


def programs(
    fn: Callable[..., Any], *args: Any, dynamic: bool | None = False, name: str = "graph"
) -> list[FxProgram]:
    """The programs of one call and of its backward pass."""
    found: list[FxProgram] = []

    def compile_fx(p: FxProgram) -> Callable[[list[Any]], Sequence[Any]]:
        found.append(p)
        return p.eager()

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture(gm, inputs, compile_fx, Options(cache=False), native_ops(), name)

    torch._dynamo.reset()
    made = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    if isinstance(made, Tensor) and made.requires_grad:
        made.sum().backward()
    return found


def text(fn: Callable[..., Any], *args: Any, **how: Any) -> str:
    found = identity(programs(fn, *args, **how)[0])
    assert found is not None
    return found


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return x * 2.0 + y.sum(1, keepdim=True)


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def test_the_same_program_has_the_same_text() -> None:
    first = text(scaled, given(4, 6), given(4, 6))
    assert first == text(scaled, torch.randn(4, 6), torch.randn(4, 6))
    symbolic = text(scaled, given(4, 6), given(4, 6), dynamic=True)
    assert symbolic == text(scaled, given(4, 6), given(4, 6), dynamic=True) != first


BASE = text(scaled, given(4, 6), given(4, 6))
OTHERS: dict[str, Callable[[], str]] = {
    "a size": lambda: text(scaled, given(4, 1), given(4, 6)),
    "a stride": lambda: text(scaled, given(4, 6), given(6, 4).t()),
    "an offset": lambda: text(scaled, given(4, 6), given(5, 6)[1:]),
    "a type": lambda: text(scaled, given(4, 6), given(4, 6, dtype=torch.float64)),
    "an op": lambda: text(lambda x, y: x / 2.0 + y.sum(1, keepdim=True), given(4, 6), given(4, 6)),
    "a number": lambda: text(
        lambda x, y: x * 2.5 + y.sum(1, keepdim=True), given(4, 6), given(4, 6)
    ),
    "the type of a number": lambda: text(
        lambda x, y: x * 2 + y.sum(1, keepdim=True), given(4, 6), given(4, 6)
    ),
    "a dimension": lambda: text(
        lambda x, y: x * 2.0 + y.sum(0, keepdim=True), given(4, 6), given(4, 6)
    ),
    "a result": lambda: text(
        lambda x, y: ((z := x * 2.0) + y.sum(1, keepdim=True), z), given(4, 6), given(4, 6)
    ),
    "a write": lambda: text(
        lambda x, y: x.mul_(2.0) + y.sum(1, keepdim=True), given(4, 6), given(4, 6)
    ),
    "a gradient": lambda: text(scaled, given(4, 6).requires_grad_(), given(4, 6)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_fact_gives_another_text(what: str) -> None:
    assert OTHERS[what]() != BASE, f"{what} is not in the text"


def test_the_number_of_a_graph_is_not_in_the_text() -> None:
    """Else another order of compilation would find nothing in the cache."""
    assert text(scaled, given(4, 6), given(4, 6), name="graph7") == BASE


def test_signs_of_zero_and_kinds_of_numbers_differ() -> None:
    numbers: list[Any] = [0.0, -0.0, 0, False, float("inf"), float("nan"), 1.0, 1, True, 1 + 0j]
    t = IdentityText()
    texts = [t.value(n) for n in numbers]
    assert len(set(texts)) == len(numbers), texts


def test_sizes_are_told_with_range_and_example() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.relu().sum(0)

    def marked(size: int, most: int) -> Tensor:
        x = given(size, 5)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=most)
        return x

    texts = [text(fn, marked(s, m), dynamic=None) for s, m in ((8, 128), (9, 128), (8, 64))]
    assert len(set(texts)) == 3, "example sizes and ranges decide how a loop is cut"


def test_a_line_of_the_source_and_elements_of_constants_are_left_out() -> None:
    def made(value: float) -> Callable[[Tensor], Tensor]:
        table = torch.arange(6.0) * value

        def fn(x: Tensor) -> Tensor:
            return x + torch.tensor([value, 2 * value, 3.5])[:, None].sum() + table

        return fn

    scope: dict[str, Any] = {}
    for lines in ("", "\n\n\n"):
        exec(compile(f"{lines}def fn(x):\n    return x.relu() + 1\n", "<mem>", "exec"), scope)
        scope.setdefault("texts", []).append(text(scope["fn"], given(3)))
    assert scope["texts"][0] == scope["texts"][1]
    assert text(made(1.25), given(6)) == text(made(4.5), given(6))


def test_programs_with_bodies_of_their_own_have_no_text() -> None:
    def fn(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))

    *bodies, p = programs(fn, given(4))
    assert p.modules and identity(p) is None
    assert len({identity(b) for b in bodies} - {None}) == 2, "the bodies are programs themselves"


def test_both_halves_of_a_training_step_have_texts() -> None:
    forward, backward = programs(scaled, given(4, 6).requires_grad_(), given(4, 6).requires_grad_())
    texts = identity(forward), identity(backward)
    assert None not in texts and texts[0] != texts[1]


def test_no_guard_is_added() -> None:
    (p,) = programs(scaled, given(4, 6), given(4, 6), dynamic=True)
    env = p.symbols.shape_env
    assert env is not None
    before = len(env.guards)
    assert identity(p)
    assert len(env.guards) == before


TOLD = {
    FxProgram: "kind gm placeholders outputs mutated constants modules symbols saved apart facts "
    "deterministic",
    Placeholder: "name kind value is_static source is_donated",
    Output: "node value",
    Binding: "var argument what dim factor symbol",
}
# Reports and comments read the first four; the others follow from `node` and `value`.
LEFT_OUT = {
    FxProgram: "name guards ended_by called",
    Output: "kind shape stride offset is_input alias_input alias_output duplicate_of",
}


@pytest.mark.parametrize("kind", TOLD, ids=lambda k: k.__name__)
def test_every_field_of_a_program_is_told_or_left_out_on_purpose(kind: type) -> None:
    names = set(TOLD[kind].split()) | set(LEFT_OUT.get(kind, "").split())
    assert {f.name for f in fields(kind)} <= names, "a new field: put it into the text as well"
