"""docs/howto/*.md: each page runs in a process of its own, since it adds ops, lowerings and faults.

`python tests/docs/blocks.py PAGE --update` rewrites the outputs of a page.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY, blocks_of

PAGES = sorted((REPOSITORY / "docs" / "howto").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[p.stem for p in PAGES])
def test_a_howto_runs(page: Path) -> None:
    assert blocks_of(page), "a page has a worked example"
    runner = REPOSITORY / "tests" / "docs" / "blocks.py"
    done = subprocess.run(
        [sys.executable, str(runner), str(page)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_every_page_is_there() -> None:
    assert {p.stem for p in PAGES} >= {
        "add-an-op",
        "add-a-lowering",
        "add-a-pass",
        "add-a-target",
        "add-a-device-from-outside",
        "receive-the-fx-graph",
        "run-your-own-passes",
        "debug-a-miscompile",
    }
