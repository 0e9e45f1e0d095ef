"""docs/features.md: each feature once, and each test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ([A-Z]\d?-\w+) \| .+? \| (shown|partly|missing) \| (.+) \|$", re.M)
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_test_that_is_named_exists() -> None:
    rows = ROW.findall((ROOT / "docs" / "features.md").read_text())
    names = [name for name, _, _ in rows]
    assert len(names) == len(set(names)) == 90, "a row for each feature, once"
    for name, state, shown in rows:
        tests = TEST.findall(shown)
        assert bool(tests) == (state != "missing"), f"{name} is {state}"
        for file, function in tests:
            path = ROOT / file
            assert path.exists(), f"{name}: {file} is not there"
            text = path.read_text()
            assert not function or f"def {function}(" in text, f"{name}: no {function} in {file}"
