"""The generated pages are what `python docs/generate.py` writes today."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from lenz.ir.op import all_ops
from lenz.lower import native_ops
from tests.docs.blocks import REPOSITORY

DOCS = REPOSITORY / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    made: dict[str, str] = generator().pages()
    return made


def test_generated_pages_are_current(pages: dict[str, str]) -> None:
    assert len(pages) == 5
    for name, text in pages.items():
        found = (DOCS / name).read_text(encoding="utf-8")
        assert found == text, f"docs/{name} is out of date: run python docs/generate.py"


def test_every_op_and_every_lowering_is_listed(pages: dict[str, str]) -> None:
    for op in all_ops():
        if op.eager is not None and op.arity > 0:
            assert f"| `{op.name}` |" in pages["ops.md"]
    for name in native_ops():
        assert f"`{name.removeprefix('aten.')}`" in pages["lowerings.md"]
