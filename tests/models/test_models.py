"""Each model in eager, lenz and float64: results, gradients, steps of training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.models.architectures import Unbuilt, names
from tests.models.compare import Sides, in_double, judge
from tests.models.example import Example
from tests.models.families import MODELS, example, kinds
from tests.models.table import Row, total, work


@pytest.mark.one_in(6, 1)
def test_a_model_is_as_close_to_float64_as_eager_is(model: str) -> None:
    for kind in kinds(example(model)):
        sides, faults = judge(model, kind)
        assert not sides.skips, f"{kind}: {sides.skips}"
        assert not faults, f"{kind}:\n" + "\n".join(faults)


def test_the_page_has_every_model() -> None:
    """What it says of them is of the day when `make models` wrote it."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert len(MODELS) >= 25
    for name in MODELS:
        assert f"\n| {name} | inference |" in page, f"{name}: run make models"


def test_an_architecture_is_small_and_right() -> None:
    made = example("afmoe", 3)
    assert sum(p.numel() for p in made.module.parameters()) < 1_000_000
    assert all(p.any() for p in made.module.parameters()), "its router was zeros"
    again = example("afmoe", 3)
    torch.testing.assert_close(made.module.state_dict(), again.module.state_dict(), rtol=0, atol=0)
    sides, faults = judge("afmoe", "inference")
    assert not faults and not sides.skips


def test_a_type_of_configuration_without_a_model_is_left_out() -> None:
    assert "aimv2_text_model" in names()
    with pytest.raises(Unbuilt, match="aimv2_text_model"):
        example("aimv2_text_model")
    assert work("aimv2_text_model", "cpu") == []


def test_a_row_that_eager_cannot_judge_does_not_pass() -> None:
    row: Row = {"model": "m", "kind": "inference", "faults": [], "calls": (1, 0, 0)}
    assert total([row]).startswith("1 of 1 rows pass. ")
    assert total([row | {"traced": True}]).startswith("0 of 1 rows pass, 1 cannot be judged. ")


def sides(eager: Tensor, lenz: Tensor) -> Sides:
    """Sides of one result, whose exact value is ones."""
    from lenz.page.report import Report

    exact = torch.ones(100, dtype=torch.float64)
    report = Report((), (), None)
    return Sides({"result": exact}, {"result": eager}, {"result": lenz}, report, {}, torch.float32)


def test_what_is_farther_than_eager_is_a_fault() -> None:
    ones = torch.ones(100)
    assert not sides(ones + 1e-6, ones + 1.4e-6).faults()
    assert sides(ones + 1e-6, ones + 2e-6).faults()
    assert sides(ones, ones + 1e-6).faults()
    assert sides(ones, ones.where(torch.arange(100) > 0, torch.nan)).faults()
    assert sides(ones, ones.double()).faults(), "another type"


def test_one_bad_draw_is_no_fault_but_their_mean_is() -> None:
    ones = torch.ones(100)
    bad, good = sides(ones + 1e-6, ones + 3e-6), sides(ones + 1e-6, ones + 9e-7)
    exact = sides(ones + 1e-6, ones)
    broken = sides(ones, ones.where(torch.arange(100) > 0, torch.nan))
    assert bad.faults() and not bad.faults(*[good] * 7)
    assert bad.faults(*[bad] * 6, exact), "an exact draw outweighs no others"
    assert good.faults(*[good] * 6, broken), "a draw that gives nan is a fault"


def test_a_reference_computes_in_float64_also_what_asks_for_float32() -> None:
    def f(x: Tensor) -> Tensor:
        third = torch.full((1,), 1 / 3, dtype=torch.float32)
        return x.to(torch.float32) + x.float() + third + torch.arange(1, dtype=torch.float32) / 3

    x = torch.tensor([0.1], dtype=torch.float64)
    assert f(x).item() != 0.2 + 1 / 3
    with in_double():
        assert f(x).item() == 0.2 + 1 / 3
    assert torch.get_default_dtype() is torch.float32


def test_a_wrong_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = module(x)
        return made * 1.001 if torch.compiler.is_compiling() else made

    wrong = Example(nn.Linear(4, 4), (torch.randn(3, 4),), forward, lambda out, x: out.sum())
    monkeypatch.setitem(MODELS, "wrong", lambda: wrong)
    for kind in ("inference", "training"):
        assert judge("wrong", kind)[1], kind
