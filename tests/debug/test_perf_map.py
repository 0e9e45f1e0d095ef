"""The option `perf_map`: the names, addresses and sizes of CPU kernels, for Linux `perf`."""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lenz
from lenz import perf_map
from lenz.ir.binary import sections
from lenz.machines import Code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="perf is a tool of Linux")
FILE = Path(f"/tmp/perf-{os.getpid()}.map")


@pytest.fixture(autouse=True)
def no_file() -> Iterator[None]:
    FILE.unlink(missing_ok=True)
    yield
    FILE.unlink(missing_ok=True)


def soft(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1).sum(0) * 2


def test_a_map_covers_the_code_of_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line has the bytes of a function of the object; relocations differ from it."""
    seen: list[Code] = []
    run = perf_map.map_kernels
    monkeypatch.setattr("lenz.pipeline.map_kernels", lambda c: (seen.append(c), run(c)))
    x = torch.randn(300, 64)
    fn = torch.compile(soft, backend="lenz", options={"perf_map": True})  # type: ignore[arg-type]
    torch.testing.assert_close(fn(x), soft(x))
    rows = [line.split(" ") for line in FILE.read_text().splitlines()]
    placed = {name: (int(at, 16), int(size, 16)) for at, size, name in rows}
    (code,) = seen
    for name, f in code.functions.items():
        assert placed[name][0] == ctypes.cast(f, ctypes.c_void_p).value, name  # type: ignore[arg-type]
    names = {name.partition(".")[0] for name in placed}
    assert code.functions.keys() <= names and any(".p" in name for name in placed), placed
    (obj,) = code.files.values()
    for name, section, offset, size in perf_map.functions_of(obj):
        assert placed[name][1] == size > 0, name
        loaded = ctypes.string_at(*placed[name])
        start = sections(obj)[section][1] + offset
        same = sum(a == b for a, b in zip(loaded, obj[start : start + size], strict=True))
        assert same > 0.8 * size, f"{name} is mapped where other code is"
    assert stat.S_IMODE(FILE.stat().st_mode) == 0o600


def test_names_are_those_of_the_report_and_a_map_grows() -> None:
    options = {"perf_map": True}
    first = lenz.explain(soft, options=options)(torch.randn(8, 16))
    size = FILE.stat().st_size
    second = lenz.explain(torch.tanh, options=options)(torch.randn(8))
    text = FILE.read_text()
    for report in (first, second):
        for kernel in report.graphs[0].kernels:
            assert f" {kernel.name}\n" in text
    assert 0 < size < len(text)


def test_without_the_option_there_is_no_map() -> None:
    torch.compile(soft, backend="lenz")(torch.randn(8, 17))
    assert not FILE.exists()


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "open to others"])
def test_a_file_that_others_may_have_made_is_left_alone(kind: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    if kind == "link":
        FILE.symlink_to(victim)
    elif kind == "hard link":
        try:
            os.link(victim, FILE)
        except OSError:
            pytest.skip("another file system")
    elif kind == "pipe":
        os.mkfifo(FILE)
    else:
        FILE.write_text("")
        FILE.chmod(0o666)
    fn: Any = torch.compile(soft, backend="lenz", options={"perf_map": True})  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=f"lenz: {FILE} is not written: "):
        fn(torch.randn(8, 18))
    assert victim.read_text() == "mine"
    assert kind in ("link", "pipe") or FILE.read_text() == victim.read_text()[: FILE.stat().st_size]
