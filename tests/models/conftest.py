"""How many models a run takes: a sample that a seed draws, or all."""

from __future__ import annotations

import random
from datetime import date

import pytest

from tests.models.families import MODELS

SAMPLE = 14  # models: about two minutes of a core


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-models", action="store_true", help="all models, and not a sample")
    parser.addoption("--models-seed", type=int, default=None, help="draws the sample")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The seed stands in the name of each test; without one given, each day has its own."""
    if "model" not in metafunc.fixturenames:
        return
    seed = metafunc.config.getoption("--models-seed", default=None)
    seed = date.today().toordinal() if seed is None else seed
    names = sorted(random.Random(seed).sample(sorted(MODELS), SAMPLE))
    if metafunc.config.getoption("--all-models", default=False):
        names = list(MODELS)
    metafunc.parametrize("model", names, ids=[f"{n}, --models-seed {seed}" for n in names])
