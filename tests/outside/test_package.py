"""The package as people get it: a wheel and an sdist, and a compilation by what they hold."""

from __future__ import annotations

import email
import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import lenz

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, torch

def small(x):
    return torch.softmax(x.sin(), -1)

x = torch.randn(8, 16)
got = torch.compile(small, backend="lenz", options={"on_error": "raise"})(x)
torch.testing.assert_close(got, small(x))
print(sys.modules["lenz"].__file__, sys.modules["lenz"].__version__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the wheel, which is made from the sdist, and the sdist."""
    for name in ("build", "hatchling"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (n for n in opened.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(opened.read(name))


def test_every_file_of_lenz_is_in_both(wheel: Path, built: Path) -> None:
    kept = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "lenz").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    with zipfile.ZipFile(wheel) as opened:
        there = {n for n in opened.namelist() if n.startswith("lenz/")}
    assert there == kept and "lenz/py.typed" in there
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert kept <= names and {"README.md", "LICENSE", "hatch_build.py"} <= names


def test_the_metadata_says_what_people_look_for(metadata: Message) -> None:
    assert metadata["Version"] == lenz.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"gpu", "fleet"} <= set(metadata.get_all("Provides-Extra") or ())
    from trove_classifiers import classifiers  # comes with hatchling

    given = metadata.get_all("Classifier") or []
    assert len(given) > 8 and set(given) <= set(classifiers)
    assert "Programming Language :: Python :: 3.13" in given and "Typing :: Typed" in given


def test_the_page_is_the_readme_without_links_into_the_repository(metadata: Message) -> None:
    page = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert page.startswith("# lenz\n") and "```python\n" in page
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert not [x for x in links if not x.startswith(("https://", "#"))], links
    assert "!" not in page.replace("!=", ""), "half a picture"


def test_what_is_installed_compiles(wheel: Path, tmp_path: Path) -> None:
    """In a folder of its own, where torch finds it by the entry point."""
    target, cache = tmp_path / "installed", tmp_path / "cache"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "LENZ_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(target / "lenz" / "__init__.py"), lenz.__version__]
    assert list(cache.rglob("*.object")), "no kernel was compiled"
