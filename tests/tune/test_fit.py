"""The fit of the cost model: the whole run without a GPU, and what its table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fit_gpu
from benchmarks.fit_gpu import Point, said, summary
from lenz.debug.report import Tried
from lenz.ir.graph import Graph
from lenz.ir.kernel import Launch
from lenz.ir.reader import read
from lenz.machine.cuda.shape import Shape
from lenz.machine.cuda.tune.search import config
from lenz.schedule import schedule
from lenz.sym import SymEnv
from tests.gpu_oracle import gpu_context, on_gpu

WIDE, NARROW = Shape(tile=4096), Shape(tile=512)


def point(case: str, usual: float | None, wide: float | None, narrow: float | None) -> Point:
    """x + x of a million elements with three tiles, and what each took."""
    g = read(
        "graph @g() on cpu {\n  in %x : f32[1000000]\n"
        "  out %y = f32[1000000] : map (i: 1000000) { add(load(%x, [i]), load(%x, [i])) }\n}"
    )
    assert isinstance(g, Graph)
    shapes = (Shape(), WIDE, NARROW)
    (step,) = schedule(on_gpu(g), gpu_context(), lambda *_: shapes[1:]).steps
    assert isinstance(step, Launch) and len(set(step.candidates)) == 3
    p = Point(case, "pointwise", 1_000_000, 1, shapes, step.candidates, SymEnv())
    times = zip(step.candidates, (usual, wide, narrow), strict=True)
    p.tried = {config(k): Tried(config(k), us, "" if us else "failed") for k, us in times}
    return p


def test_a_family_is_judged_by_the_best_of_each_kernel() -> None:
    (row,) = summary([point("a", 10.0, 5.0, 20.0), point("b", 8.0, 8.0, 4.0)])
    assert (row["family"], row["kernels"]) == ("pointwise", 2)
    assert row["usual"] == pytest.approx(2.0), "2 of the best in both"
    assert (row["worst"], row["worst_case"]) == (2.0, "a")
    assert row["worst_best"] == "tile=4096"
    assert (row["best"], row["best_mean"]) == ("tile=4096", pytest.approx(2.0**0.5))


def test_shapes_that_a_kernel_was_not_measured_with_are_not_for_all() -> None:
    (row,) = summary([point("a", 10.0, 5.0, 20.0), point("b", 10.0, None, 9.0)])
    assert row["best"] == "usual", "the wide tile has no time in b, the narrow one is slow in a"
    assert row["usual"] == pytest.approx((2.0 * 10.0 / 9.0) ** 0.5)


def test_a_kernel_without_a_time_of_the_cost_model_is_no_part_of_it() -> None:
    assert summary([point("a", None, 5.0, 20.0)]) == []


def test_bytes_and_failures_are_in_the_file() -> None:
    row = point("a", 10.0, None, 20.0).row()
    assert row["bytes"] == 8_000_000
    assert row["us"] == {"p0 1024, 4 warps": 10.0, "p0 512, 4 warps": 20.0}
    assert row["usual"] == "p0 1024, 4 warps"
    assert list(row["out"].values()) == ["failed"]


def test_a_shape_is_named_by_what_differs() -> None:
    assert said(Shape()) == "usual"
    assert said(Shape(chunk=4096, stages=3)) == "chunk=4096 stages=3"


def test_a_dry_run_measures_every_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fit.json"
    code = fit_gpu.main(["--quick", "--only", "s*", "--json", str(file)])
    out = capsys.readouterr().out
    assert code == 0, out
    made = json.loads(file.read_text(encoding="utf-8"))
    assert made["failed"] == {} and made["machine"]["gpu"] == "none (CPU)"
    found = {k["case"] for k in made["kernels"]}
    assert found == {c.name for c in fit_gpu.cases(quick=True) if c.name.startswith("s")}
    kernels = made["kernels"]
    assert all(k["usual"] in k["us"] and len(k["us"]) > 1 and "out" not in k for k in kernels)
    for row in made["families"]:
        assert row["family"] in out and 1.0 <= row["usual"] <= row["worst"]


def test_the_cost_model_of_today_is_judged_by_times_that_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tile that is usual now had another place when it was measured."""
    measured = point("a", 30.0, 10.0, 20.0)
    rows = [measured.row()]
    now = point("a", None, None, None)
    now.candidates = (measured.candidates[1], measured.candidates[0], measured.candidates[2])
    now.tried = {}
    now.recall(rows)
    assert list(now.times().values()) == [10.0, 30.0, 20.0]
    assert fit_gpu.slow([now]) == [] and len(fit_gpu.slow([measured])) == 1
    other = point("b", None, None, None)
    other.tried = {}
    other.recall(rows)
    assert other.tried == {} and "not measured" in fit_gpu.slow([other])[0]
    file = tmp_path / "fit.json"
    only = ["--only", "scale 4096 bf16", "--json", str(file)]
    assert fit_gpu.main(["--quick", *only]) == 0
    text = file.read_text(encoding="utf-8")
    capsys.readouterr()
    assert fit_gpu.main(["--judge", *only]) == 0
    assert "1 kernels" in capsys.readouterr().out
    assert file.read_text(encoding="utf-8") == text, "to judge writes nothing"
