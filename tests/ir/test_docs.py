"""docs/ir.md: its examples are canonical and valid, and its table of rules is the verifier's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lenz.ops  # noqa: F401 - fills the table of ops
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.ir.verify import RULES, verify

PAGE = (Path(__file__).parents[2] / "docs" / "ir.md").read_text()
EXAMPLES = re.findall(r"```lenz\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=[t.split("(")[0] for t in EXAMPLES])
def test_example(text: str) -> None:
    x = read(text)
    verify(x)
    assert show(x) == text


def test_there_is_an_example_of_every_level() -> None:
    assert {t.split()[0] for t in EXAMPLES} == {"graph", "kernel", "schedule", "plan"}


def test_rules() -> None:
    table = dict(re.findall(r"^\| ([a-z-]+) \| (.*) \|$", PAGE, re.MULTILINE))
    table.pop("rule", None)
    assert table == RULES
