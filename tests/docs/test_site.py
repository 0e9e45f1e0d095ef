"""The documentation site: it builds with --strict, and its pages load nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY

# What the site is made of.
SOURCES = ("docs", "mkdocs.yml", "ARCHITECTURE.md", "CHANGELOG.md", "benchmarks/README.md")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    done = build(REPOSITORY, made)
    assert done.returncode == 0, done.stderr
    return made


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]*)"', text)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*>', text)
        assert not [x for x in loaded if "//" in x], page


def test_links_into_the_repository_are_names_or_pages(site: Path) -> None:
    limits = (site / "numerics.html").read_text(encoding="utf-8")
    assert "ops.html" in limits
    start = (site / "choose-a-backend.html").read_text(encoding="utf-8")
    assert re.search(r'href="BENCHMARKS.html"[^>]*>benchmarks</a>', start)
    device = (site / "howto" / "add-a-device-from-outside.html").read_text(encoding="utf-8")
    assert "tests/outside/device.py" in device
    links = [x for p in site.rglob("*.html") for x in re.findall(r'href="([^"]*)"', p.read_text())]
    assert not [x for x in links if x.endswith((".py", ".md", ".ptx", ".ll"))]


def test_a_link_to_nothing_fails_the_build(tmp_path: Path) -> None:
    for name in SOURCES:
        source, target = REPOSITORY / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    page = tmp_path / "docs" / "index.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[gone](howto/gone.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and "howto/gone.md" in done.stderr


# A page may tell what a file was called before.
NAMED = re.compile(r"(?<!was )`((?:lenz/)?[a-z_]+/[\w/]+\.py)`")


def test_files_that_pages_name_are_there() -> None:
    """A decision outlives the place of the code that it is about."""
    rooms = ("lenz", "tests", "benchmarks", "examples", "docs")
    known = [f"/{p.relative_to(REPOSITORY)}" for r in rooms for p in (REPOSITORY / r).rglob("*.py")]
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    named = [(p.name, x) for p in pages for x in NAMED.findall(p.read_text(encoding="utf-8"))]
    assert len(named) > 50
    assert not [(page, x) for page, x in named if not any(k.endswith(f"/{x}") for k in known)]
