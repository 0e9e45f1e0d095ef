"""A seeded tenth of torch's op database, less in `make test`; `opinfo.py` runs all of it."""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from lenz.runtime.native import places
from tests.e2e.opinfo import DTYPES, MODES, keys, page
from tests.e2e.readers import LEFT, NATIVE, OFF, together, told, watched
from tests.e2e.sweep import Row, cases, name_of, sweep

# Equal parts of the tenth, so that workers share it.
PARTS = 40
SEED = 2


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed, which pytest prints with what a failing test has captured."""
    given = request.config.getoption("--sweep-seed", default=None)
    chosen = SEED if given is None else int(given)
    print(f"--sweep-seed {chosen}")
    return chosen


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No warnings, of which bad inputs and old ops give many."""
    pytest.importorskip("expecttest", reason="torch's op database needs it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.one_in(40, 2)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_tenth_of_all_ops_agrees_with_eager(part: int, seed: int) -> None:
    every = sorted(keys([], DTYPES, MODES))
    chosen = random.Random(seed).sample(every, len(every) // 10)[part::PARTS]
    ops = {name_of(op): op for op in cases()}
    rows = [
        sweep(ops[name], getattr(torch, dtype), 1, mode == "dynamic", "cpu", k % 8 == 0, seed + k)
        for k, (name, dtype, mode) in enumerate(chosen)
    ]
    bad = [str(r) for r in rows if r.failures]
    assert not bad, "\n".join(bad)
    assert sum(r.passed > 0 for r in rows) > len(rows) * 0.8
    count = together(r.readers for r in rows)
    print(told(count))
    if os.environ.get("LENZ_NATIVE") == "0":
        assert {*count} == {OFF}, count
    elif places() is not None:
        assert {*count} == {NATIVE}, "plans or calls that native code leaves to Python"


def test_what_runs_plans_is_told() -> None:
    count = {NATIVE: 7, "kernels on tpu": 2, LEFT: 3}
    said = "7 of 9 plans by native code (2 kernels on tpu); 3 calls that native code left to Python"
    assert told(count) == said
    rows = {("a", "float32", "static"): Row("a", "float32", passed=1, readers=count)}
    assert said in page(rows, 1, 1)


@pytest.mark.skipif(places() is None, reason="this torch keeps its tensors otherwise")
def test_calls_that_native_code_leaves_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENZ_NATIVE", "1")
    count, x = Counter[str](), torch.randn(3, requires_grad=True)
    with watched(count):
        y = torch.compile(lambda x: x * x, backend="lenz")(x)
        y.backward(torch.ones(3), retain_graph=True)
        assert count == {NATIVE: 2, OFF: 0}
        y.backward(torch._neg_view(torch.ones(3)))  # whose bit of the sign no kernel looks at
        assert count[LEFT] == 1, count


# Of these, rows with NaN or infinities were other ones than in eager.
LOST_NAN = (
    "cdist", "nn.functional.pdist", "mode", "grid_sampler_3d", "special.zeta",
    "polygamma.polygamma_n_2", "special.chebyshev_polynomial_t",
)  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("part", range(4))
def test_special_values_are_those_of_eager(part: int, seed: int) -> None:
    """NaN, infinities and zeros of both signs; `make special` takes all ops."""
    ops = {name_of(op): op for op in cases() if torch.float32 in op.supported_dtypes("cpu")}
    chosen = [*LOST_NAN, *random.Random(seed).sample(sorted(ops), len(ops) // 20)][part::4]
    rows = [sweep(ops[name], torch.float32, 2, first=seed + k, special=True)
            for k, name in enumerate(chosen)]  # fmt: skip
    bad = [str(r) for r in rows if r.failures]
    assert not bad, "\n".join(bad)
    assert sum(r.passed > 0 for r in rows) > len(rows) * 0.7


def test_a_call_of_the_forward_half_is_not_native_on_the_page() -> None:
    """Fields in another order made it one of those where aot_eager differs."""
    rows = {
        ("a", "float32", "static"): Row(
            "a", "float32", passed=1, externs={"aten.a": "no lowering"}
        ),
        ("b", "float32", "static"): Row("b", "float32", passed=1, backward={"aten.b": "none"}),
    }
    assert "Forward only: native 1 of 2 (50.0%)" in page(rows, 1, 2)
