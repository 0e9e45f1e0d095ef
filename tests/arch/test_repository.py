"""What holds for every file of the repository, code or not."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from tests.arch import limits
from tests.arch.source import REPOSITORY, sources

TEXT = (".py", ".md", ".toml", ".txt", ".ir", ".cfg", ".yml", ".yaml", ".json", "")


def files() -> list[Path]:
    """The files that git keeps, or would keep."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout")
    paths = [REPOSITORY / name for name in run.stdout.splitlines()]
    return [p for p in paths if p.suffix in TEXT and p.is_file()]


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in files():
        text = path.read_text(encoding="utf-8")
        found += [f"{path}: {w}" for w in limits.MACHINE_WORDS if w in text.lower()]
    assert not found, "\n".join(found)


def test_every_package_that_is_named_is_pinned() -> None:
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    names = {line.split("==")[0] for line in pins.splitlines() if "==" in line}
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    start = project.index("dependencies = [")
    listed = project[start : project.index("[project.entry-points")]
    start, end = listed.index("classifiers = ["), listed.index("[project.optional")
    listed = listed[:start] + listed[end:]
    wanted = [
        line.strip().strip('",').split(">")[0].split("<")[0]
        for line in listed.splitlines()
        if line.startswith('  "')
    ]
    assert {"torch", "llvmlite", "pytest"} <= set(wanted) <= names


def test_the_code_reads_on_the_oldest_python() -> None:
    """Syntax only: names that later versions added are mypy's and the import tests' to find."""
    for source in sources():
        ast.parse(source.text, source.name, feature_version=(3, 10))


def test_the_package_says_that_it_is_typed() -> None:
    """Without this file type checkers take all of an installed lenz for Any."""
    assert (REPOSITORY / "lenz" / "py.typed").is_file()
