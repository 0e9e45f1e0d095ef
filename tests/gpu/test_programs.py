"""Random programs on the GPU: eager and the compiled code agree, bit by bit where all is exact."""

from __future__ import annotations

import pytest

from tests.fuzz.check import failure
from tests.fuzz.generator import program
from tests.fuzz.shrink import shrink

LARGE_FROM = 1000  # seeds of programs with sizes up to 300


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`--programs` seeds, an eighth of them with large sizes, four to a test."""
    count = metafunc.config.getoption("--programs", default=160)
    few = count // 8
    seeds = [*range(count - few), *range(LARGE_FROM, LARGE_FROM + few)]
    starts = [tuple(seeds[k : k + 4]) for k in range(0, len(seeds), 4)]
    metafunc.parametrize("seeds", starts, ids=[f"from {s[0]}" for s in starts])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of odd programs
def test_a_program_gives_what_eager_gives(seeds: tuple[int, ...], device: str) -> None:
    for seed in seeds:
        p = program(seed, large=seed >= LARGE_FROM)
        why = failure(p, "cpu", device)
        if why:
            small = shrink(p, why, lambda q: failure(q, "cpu", device))
            pytest.fail(f"{small}\n{failure(small, 'cpu', device)[:1500]}\n{small.script()}")
