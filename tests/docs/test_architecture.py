"""ARCHITECTURE.md, and the other pages, name files and tests that exist, and IR that is valid."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import lenz
import lenz.ops  # fills the op table
from lenz.ir.reader import read
from lenz.ir.verify import verify
from tests.docs.blocks import REPOSITORY

PAGE = REPOSITORY / "ARCHITECTURE.md"
TEXT = PAGE.read_text(encoding="utf-8")
PAGES = [PAGE, *sorted((REPOSITORY / "docs").rglob("*.md"))]
LENZ = REPOSITORY / "lenz"

# The files whose classes are IR, or travel beside it.
DATA = (
    "ir/dtype.py", "ir/op.py", "ir/tensor.py", "ir/graph.py", "ir/kernel.py", "ir/plan.py",
    "sym/env.py", "target.py", "options.py",
)  # fmt: skip
CHANGING = re.compile(r"\b(list|dict|set|List|Dict|Set|bytearray)\b")


def code_map() -> dict[str, list[str]]:
    """Room (a folder with a slash, or files) -> the files that its row names."""
    rows: dict[str, list[str]] = {}
    table = TEXT.split("## Code map")[1].split("\n## ")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            room, _, files = line.strip("|").split("|")
            rows[room] = re.findall(r"`([\w/]+\.py)`", room) + re.findall(r"`([\w/]+\.py)`", files)
    return rows


def test_the_code_map_names_every_file_and_no_other() -> None:
    named: list[str] = []
    for room, files in code_map().items():
        folders = re.findall(r"`([\w/]+)/`", room)
        for file in files:
            places = [f"{f}/{file}" for f in folders if (LENZ / f / file).is_file()]
            named.append(places[0] if places else file)
    found = [p.relative_to(LENZ).as_posix() for p in LENZ.rglob("*.py")]
    found = [f for f in found if f == "__init__.py" or not f.endswith("/__init__.py")]
    missing, gone = sorted(set(found) - set(named)), sorted(set(named) - set(found))
    assert not missing, f"the code map of ARCHITECTURE.md lacks {missing}"
    assert not gone, f"the code map of ARCHITECTURE.md names {gone}, which is not there"


def test_every_invariant_names_a_test_that_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) >= 10
    for file, name in named:
        path = REPOSITORY / file
        assert path.is_file(), f"{file} is not there"
        assert f"def {name}(" in path.read_text(encoding="utf-8"), f"{file} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPOSITORY).as_posix())
def test_a_page_names_what_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_site_has_every_guide_in_its_menu() -> None:
    """`make docs` fails without; here it is seen at once, and where mkdocs is not installed."""
    menu = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    guides = [p.name for p in (REPOSITORY / "docs" / "howto").glob("*.md")]
    wrong = [name for name in guides if menu.count(f": howto/{name}\n") != 1]
    assert guides and not wrong, f"in nav of mkdocs.yml, once: {wrong}"


BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{n}")
    for page in PAGES
    for n, block in enumerate(re.findall(r"^```lenz\n(.*?)^```$", page.read_text(), re.S | re.M))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_ir_in_a_page_is_valid(block: str) -> None:
    verify(read(block))


def test_the_example_is_what_the_page_says() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (768,), w, b))

    report = lenz.explain(f)(torch.randn(64, 768), torch.randn(768), torch.randn(768))
    (graph,) = report.graphs
    (kernel,) = graph.kernels
    assert kernel.kind == "reduction" and kernel.loads == ("x", "w", "b")
    assert f"{kernel.bytes_read:,}" in TEXT and f"{kernel.bytes_written:,}" in TEXT
    assert not graph.externs and not graph.rejected
    assert f"@{kernel.name} " in TEXT
    for line in kernel.text.splitlines()[1:]:
        assert line in TEXT, f"the kernel has another line now:\n{line}"


def decorated(node: ast.ClassDef) -> str:
    return " ".join(ast.unparse(d) for d in node.decorator_list)


def test_ir_objects_never_change() -> None:
    """Dataclasses of the IR are frozen and have slots; no field may hold what can change."""
    count = 0
    for name in DATA:
        for node in ast.walk(ast.parse((LENZ / name).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef) or "dataclass" not in decorated(node):
                continue
            count += 1
            made = decorated(node)
            assert "frozen=True" in made and "slots=True" in made, f"{name}: {node.name}"
            for part in node.body:
                if isinstance(part, ast.AnnAssign):
                    kind = ast.unparse(part.annotation)
                    assert not CHANGING.search(kind), f"{name}: {node.name}.{part.target}: {kind}"
    assert count > 30
    from lenz.ir.dtype import F32
    from lenz.ir.expr import const

    with pytest.raises(AttributeError, match="immutable"):
        const(1, F32).args = ()
