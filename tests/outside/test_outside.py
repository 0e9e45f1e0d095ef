"""A device from outside of lenz: entry points name it, and programs run on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from lenz import machines
from tests.outside.device import NAME

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no device that is made in Python",
)
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
POINTS = "\n".join(
    f"[lenz.{half}]\n{NAME} = tests.outside.compiler" for half in ("machines", "loaders")
)


def installed(folder: Path) -> str:
    """A path on which Python finds the device's package, as an installer leaves it."""
    about = folder / "npu-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: npu\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    return str(folder)


@pytest.mark.rest
def test_programs_run_on_it(tmp_path: Path) -> None:
    """An Adam step, sorts, dynamic shapes, training, the disk cache, FX graphs, a failed check."""
    path = os.pathsep.join([str(ROOT), installed(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.outside.check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "c7_sorts_are_kernels" in done.stdout.split()


def test_it_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not machines.is_known(NAME)
    monkeypatch.syspath_prepend(installed(tmp_path))
    assert machines.is_known(NAME)


def test_it_is_small_and_lenz_does_not_know_it() -> None:
    texts = [(HERE / name).read_text() for name in ("device.py", "compiler.py")]
    assert sum(len(text.splitlines()) for text in texts) < 200
    for file in (ROOT / "lenz").rglob("*.py"):
        assert NAME not in file.read_text().split(), file
