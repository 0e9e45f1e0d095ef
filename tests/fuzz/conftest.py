"""What the tests of random programs share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet() -> Iterator[None]:
    """No logs of torch about odd programs."""
    was = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(was)
