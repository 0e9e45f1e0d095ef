"""The guides, the recipes and two more pages run, each in a process of its own: some add ops.

`python tests/docs/blocks.py PAGE --update` rewrites the outputs of a page.
"""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import REPOSITORY, blocks_of, wrong_outputs

DOCS = REPOSITORY / "docs"
PAGES = [*(DOCS / "index.md", DOCS / "choose-a-backend.md"), *sorted((DOCS / "howto").glob("*.md"))]
RECIPES = sorted((DOCS / "recipes").glob("*.md"))
# Processes are forked from one that has imported torch, which takes 3 s.
FORKS = "forkserver" in multiprocessing.get_all_start_methods()


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """The process that forks is one of these tests: others preload parts that pages change."""
    running: Any = multiprocessing.forkserver._forkserver if FORKS else None  # type: ignore[attr-defined]
    if running is not None:
        running._stop()
    yield
    if running is not None:
        running._stop()


def faults(page: Path, said: Connection) -> None:
    """Send what is wrong with a page."""
    try:
        said.send("\n".join(wrong_outputs(page, "page")))
    except BaseException:
        said.send(traceback.format_exc())
        raise


@pytest.mark.one_in(6)
@pytest.mark.parametrize("page", PAGES, ids=[p.stem for p in PAGES])
def test_a_howto_runs(page: Path) -> None:
    runs(page)


@pytest.mark.rest
@pytest.mark.parametrize("page", RECIPES, ids=[p.stem for p in RECIPES])
def test_a_recipe_runs(page: Path) -> None:
    runs(page)


def runs(page: Path) -> None:
    """Assert that the blocks of a page run and print what it says."""
    assert blocks_of(page), "a page has a worked example"
    context: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
    if FORKS:
        context.set_forkserver_preload(["torch._dynamo", "lenz.api", "tests.frozen"])
    found, said = context.Pipe(duplex=False)
    process = context.Process(target=faults, args=(page, said))
    process.start()
    said.close()
    wrong = found.recv()  # raises EOFError if the process dies
    process.join()
    assert not wrong, wrong
    assert process.exitcode == 0


def test_names_of_lenz_in_pages_exist() -> None:
    """Each run of the tests holds all of these names, though it runs a few of the pages."""
    used = {
        f"{page.stem}: {where}.{name}": (where, name)
        for page in (*PAGES, *RECIPES)
        for block in blocks_of(page)
        for where, name in names_of_lenz(ast.parse(block.code))
    }
    assert len(used) > 50
    assert [text for text, (where, name) in used.items() if not is_there(where, name)] == []


def names_of_lenz(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The module and the name of what a block imports from lenz, or reads from a module of lenz."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (where := node.module or "").startswith("lenz"):
            yield from ((where, a.name) for a in node.names)
            modules |= {a.asname or a.name: f"{where}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            whole = [a.name for a in node.names if a.name.startswith("lenz")]
            modules |= {n[:end]: n[:end] for n in whole for end in ends(n)}
        elif isinstance(node, ast.Assign) and "import_module('lenz." in ast.unparse(node.value):
            assert isinstance(node.value, ast.Call)
            modules[ast.unparse(node.targets[0])] = ast.literal_eval(node.value.args[0])
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            where = modules.get(ast.unparse(node.value), "")
            if where and is_module(where):
                yield where, node.attr


def ends(name: str) -> list[int]:
    """Where the packages end that hold a module, and the module itself."""
    return [*(i for i, c in enumerate(name) if c == "."), len(name)]


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what holds it is a class or a function
        return False


def is_there(where: str, name: str) -> bool:
    """Whether a module of lenz has a name, a module of its own included."""
    return hasattr(importlib.import_module(where), name) or is_module(f"{where}.{name}")


def test_every_page_is_there() -> None:
    assert {p.stem for p in (*PAGES, *RECIPES)} >= {
        "add-an-op",
        "diffusers",
        "distributed",
        "lightning",
        "transformers",
        "add-a-lowering",
        "add-a-pass",
        "add-a-target",
        "add-a-device-from-outside",
        "receive-the-fx-graph",
        "run-your-own-passes",
        "use-cuda-graphs",
        "debug-a-miscompile",
        "get-the-same-numbers",
        "read-a-report",
        "speed-up-a-slow-model",
        "train-a-model",
        "use-dynamic-shapes",
    }
