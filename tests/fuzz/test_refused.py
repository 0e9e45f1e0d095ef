"""A seeded sample of calls that eager refuses; `python -m tests.fuzz.refused` runs more."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.fuzz.refused import SAME, able, found, is_right

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of wrong calls


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    pytest.importorskip("expecttest", reason="torch's op database needs it")
    was = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(was)


@pytest.mark.parametrize("first", (0, 20, 40))
def test_what_eager_refuses_is_refused(first: int) -> None:
    ops, counts = able(), Counter[str]()
    for seed in range(first, first + 20):
        title, verdict = found(seed, ops)
        assert is_right(verdict), f"seed {seed}: {title}: {verdict}"
        counts[verdict] += 1
    assert counts[SAME] > 3
