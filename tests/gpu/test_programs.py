"""Random programs on the GPU: eager and the compiled code agree, bit by bit where all is exact."""

from __future__ import annotations

import pytest

from tests.e2e.programs import fails, program, shrink

LARGE_FROM = 1000  # seeds of programs with sizes up to 300


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`--programs` seeds, an eighth of them with large sizes, four to a test."""
    count = metafunc.config.getoption("--programs", default=160)
    few = count // 8
    seeds = [*range(count - few), *range(LARGE_FROM, LARGE_FROM + few)]
    starts = [tuple(seeds[k : k + 4]) for k in range(0, len(seeds), 4)]
    metafunc.parametrize("seeds", starts, ids=[f"from {s[0]}" for s in starts])


def test_a_program_gives_what_eager_gives(seeds: tuple[int, ...], device: str) -> None:
    for seed in seeds:
        p, dynamic = program(seed, large=seed >= LARGE_FROM), seed % 3 == 2
        why = fails(p, dynamic, oracle=False, device=device)
        if why:
            small = shrink(p, dynamic, oracle=False, device=device)
            why = fails(small, dynamic, oracle=False, device=device) or why
            pytest.fail(f"seed {seed} dynamic={dynamic}\n{small}\n{why[:1500]}")
