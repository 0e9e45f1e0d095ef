"""The notebooks of examples/ run from top to bottom in a kernel of Jupyter, and hold no outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "examples").glob("*.ipynb"))


def test_there_is_one() -> None:
    assert NOTEBOOKS


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    made = client.execute(cwd=str(path.parent))  # raises the error of a cell
    texts = [text_of(o) for cell in made.cells for o in cell.get("outputs", [])]
    assert any("kernel" in text for text in texts), "the report was not printed"
    assert not [t for t in texts if "lenz compiles" in t], "a notebook has no line of progress"


def text_of(output: Any) -> str:
    return str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    """Outputs are of one machine and one day."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
