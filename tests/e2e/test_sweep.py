"""A seeded tenth of torch's op database, less in `make test`; `opinfo.py` runs all of it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.e2e.opinfo import DTYPES, MODES, keys, page
from tests.e2e.sweep import Row, cases, name_of, sweep

# Equal parts of the tenth, so that workers share it.
PARTS = 20
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


@pytest.mark.one_in(20, 2)
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


# Of these, rows with NaN or infinities were other ones than in eager.
LOST_NAN = (
    "cdist", "nn.functional.pdist", "mode", "grid_sampler_3d", "special.zeta",
    "polygamma.polygamma_n_2", "special.chebyshev_polynomial_t",
)  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", range(2))
def test_special_values_are_those_of_eager(part: int, seed: int) -> None:
    """NaN, infinities and zeros of both signs; `make special` takes all ops."""
    ops = {name_of(op): op for op in cases() if torch.float32 in op.supported_dtypes("cpu")}
    chosen = [*LOST_NAN, *random.Random(seed).sample(sorted(ops), len(ops) // 20)][part::2]
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
