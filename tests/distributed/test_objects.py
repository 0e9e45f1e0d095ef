"""Objects that calls take and give: they pass through graphs that lenz compiles."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library import opaque_object

import lenz
from lenz import keys, pipeline

Base: Any = getattr(torch, "_opaque_base", None)
Base = Base.OpaqueBase if Base is not None else object


class Box(Base):
    """Its content may change: an argument of the graph."""

    def __init__(self, value: float) -> None:
        self.value = value


class Constant(Base):
    """A part of the graph, which is compiled again for another."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Constant({self.value})", {"Constant": Constant}


@pytest.fixture(scope="module")
def ops() -> Any:
    opaque_object.register_opaque_type(Box, typ="reference")
    opaque_object.register_opaque_type(Constant, typ="value")
    box, constant = map(opaque_object.get_opaque_type_name, (Box, Constant))
    library = torch.library.Library("lenz_objects", "DEF")
    library.define(f"by(Tensor x, {box} b) -> Tensor")
    library.define(f"by_constant(Tensor x, {constant} b) -> Tensor")
    for name in ("by", "by_constant"):
        library.impl(name, lambda x, b: x * b.value, "CompositeExplicitAutograd")
        fake = f"lenz_objects::{name}"
        torch.library.register_fake(fake, lambda x, b: torch.empty_like(x), lib=library)
    yield torch.ops.lenz_objects
    library._destroy()


def compiled(f: Callable[..., Any], **options: object) -> Callable[..., Any]:
    chosen = {"verify": True, "on_error": "raise", **options}
    return torch.compile(f, backend="lenz", options=chosen, fullgraph=True)  # type: ignore[arg-type]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", [Box, Constant])
def test_an_object_reaches_the_op_that_takes_it(kind: Any, ops: Any) -> None:
    op = ops.by if kind is Box else ops.by_constant

    def f(x: Tensor, b: Any) -> Tensor:
        y: Tensor = op(x + 1, b) * 2
        return y

    run, x = compiled(f), torch.randn(8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for value in (3.0, 4.0, 3.0):
            b = kind(value)
            torch.testing.assert_close(run(x, b), f(x, b))
    assert not [w for w in said if "lenz" in str(w.message)]
    report = lenz.explain(f)(x, kind(5.0))
    assert len(report.graphs[0].kernels) == 2, str(report)


def test_a_graph_with_an_object_is_recalled_for_another(
    ops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "sources", lambda again=False: "one version")

    def f(x: Tensor, b: Box) -> Tensor:
        y: Tensor = ops.by(x + 1, b) * 2
        return y

    x = torch.randn(8)
    for value in (3.0, 4.0):
        if value == 4.0:
            monkeypatch.setattr(pipeline, "compile_program", None)  # it has to be found
        torch._dynamo.reset()
        run, b = compiled(f, verify=False, cache_dir=str(tmp_path)), Box(value)
        torch.testing.assert_close(run(x, b), f(x, b))
