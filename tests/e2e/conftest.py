"""Options of the tests over torch's op database: which part of it, or all of it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """A seed chooses a tenth; it is printed where something fails."""
    parser.addoption("--sweep-seed", type=int, default=None, help="chooses the tenth of all ops")
