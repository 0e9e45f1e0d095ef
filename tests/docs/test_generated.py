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


PAGES: dict[str, str] = generator().pages()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_generated_page_is_current(name: str) -> None:
    found = (DOCS / name).read_text(encoding="utf-8")
    assert found == PAGES[name], f"docs/{name} is out of date: run python docs/generate.py"


def test_every_op_and_every_lowering_is_listed() -> None:
    for op in all_ops():
        if op.eager is not None and op.arity > 0:
            assert f"| `{op.name}` |" in PAGES["ops.md"]
    for name in native_ops():
        assert f"`{name.removeprefix('aten.')}`" in PAGES["lowerings.md"]
