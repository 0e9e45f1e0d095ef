"""What holds for every test: a cache and options of its own, and no memory of other tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's LENZ_* variables and cache out of the tests, and tests out of the cache.

    A bug of lenz is an error here, where users get a warning.
    """
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("LENZ_")]:
            patch.delenv(variable)
        folder: Path = tmp_path_factory.mktemp("lenz")
        patch.setenv("LENZ_CACHE_DIR", str(folder / "cache"))
        patch.setenv("LENZ_DEBUG_DIR", str(folder / "debug"))
        patch.setenv("LENZ_ON_ERROR", "raise")
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Forget compiled frames after a test, if it compiled any."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
