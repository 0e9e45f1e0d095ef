"""docs/tour.md: its blocks run in order and print what the page says.

UPDATE_FILES=1 in the environment rewrites the outputs of the page.
"""

from __future__ import annotations

import os

from tests.docs.blocks import REPOSITORY, blocks_of, updated, wrong_outputs

TOUR = REPOSITORY / "docs" / "tour.md"


def test_the_tour_runs() -> None:
    if os.environ.get("UPDATE_FILES"):
        TOUR.write_text(updated(TOUR, "tour"), encoding="utf-8")
    wrong = wrong_outputs(TOUR, "tour")
    assert not wrong, "\n".join(wrong)


def test_the_tour_is_as_short_as_it_says() -> None:
    blocks = blocks_of(TOUR)
    lines = sum(bool(line.strip()) for b in blocks for line in b.code.splitlines())
    assert len(blocks) >= 10 and lines <= 400, f"{len(blocks)} blocks, {lines} lines of code"
