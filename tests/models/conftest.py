"""How many models a run takes: a sample that a seed draws, or all."""

from __future__ import annotations

import random

import pytest

from tests.models.families import MODELS

SAMPLE = 14  # models: about two minutes of a core
SEED = 1  # the same models every day; `make models` takes all


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-models", action="store_true", help="all models, and not a sample")
    parser.addoption("--models-seed", type=int, default=SEED, help="draws the sample")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The seed stands in the name of each test."""
    if "model" not in metafunc.fixturenames:
        return
    seed = metafunc.config.getoption("--models-seed", default=SEED)
    names = sorted(random.Random(seed).sample(sorted(MODELS), SAMPLE))
    if metafunc.config.getoption("--all-models", default=False):
        names = list(MODELS)
    metafunc.parametrize("model", names, ids=[f"{n}, --models-seed {seed}" for n in names])
