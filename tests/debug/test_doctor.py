"""`python -m lenz doctor`: each planted problem is found, with what to do, and by the status."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lenz.cli import main
from lenz.commands import doctor
from lenz.commands.doctor import Finding
from lenz.runtime.store import Store

ROOT = Path(__file__).resolve().parents[2]


def found(check: Any) -> dict[str, Finding]:
    return {f.name: f for f in check}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, which is not there yet."""
    monkeypatch.setenv("LENZ_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_nothing_is_wrong_here(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "no problems found"
    marked = {tuple(line.split()[:2]) for line in lines if line[:1].strip()}
    assert {("ok", n) for n in ("python", "torch", "llvmlite", "backend", "cache", "on")} <= marked


def test_a_failure_is_the_status(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.write_text("a file in the folder's place")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "1 problem found" in out and f"FAIL  cache      {cache}: Not a directory" in out
    assert "set LENZ_CACHE_DIR to a folder of your own" in out


@pytest.mark.diagonal(2)
@pytest.mark.skipif(sys.platform == "win32", reason="folders have access lists there")
@pytest.mark.parametrize("inside", ["", "v2", "v2/3"])
def test_a_cache_that_others_can_write_to_is_a_failure(cache: Path, inside: str) -> None:
    (cache / "v2" / "3").mkdir(parents=True, mode=0o700)
    (cache / "v2").chmod(0o700)
    cache.chmod(0o700)
    assert not found(doctor._options())["cache"].do
    (cache / inside).chmod(0o777)
    bad = found(doctor._options())["cache"]
    assert bad.fails and "others own it or can write to it" in bad.found
    assert "chmod -R go-w" in bad.do


def test_the_cache_is_counted_and_the_probe_is_gone(cache: Path) -> None:
    Store(cache).put("object", "key", bytes(1 << 20))
    told = found(doctor._options())["cache"]
    assert not told.do and "1 entries, 1.0 of 1024 MiB" in told.found
    assert not list(cache.rglob(f"*{doctor.PROBE}*"))


def test_a_disk_that_is_full_before_the_limit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lenz.commands.doctor.shutil.disk_usage", lambda _: SimpleNamespace(free=5 << 20)
    )
    told = found(doctor._options())["cache"]
    assert not told.fails and "the disk has 5 MiB left" in told.do


def test_a_cache_that_is_off_is_a_note(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENZ_CACHE", "0")
    told = found(doctor._options())["cache"]
    assert not told.fails and "LENZ_CACHE" in told.do and not cache.exists()


def test_an_unknown_variable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENZ_FUZE", "1")
    told = found(doctor._options())["options"]
    assert told.fails and "LENZ_FUZE" in told.found and "LENZ_FUSE" in told.do


def test_a_wrong_variable_is_no_fault_of_lenz(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENZ_FUEL", "x")
    (found,) = doctor._runs()
    assert "expected a whole number" in found.found and found.do == "correct the option"


def test_a_remote_cache_that_is_not_there(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LENZ_REMOTE_CACHE", "redis://:word@localhost:1/0")
    told = found(doctor._options())["remote"]
    assert told.fails and "shared secret" in told.found and "remote_secret" in told.do
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(65, 90)))
    monkeypatch.setenv("LENZ_REMOTE_SECRET", str(secret))
    told = found(doctor._options())["remote"]
    assert told.fails and told.found.startswith("localhost:1/0: ") and "server" in told.do
    monkeypatch.setenv("LENZ_REMOTE_CACHE", "unix:///no.sock?password=word")
    assert found(doctor._options())["remote"].found.startswith("unix:///no.sock: ")


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0+cu130", "3.0.0"])
def test_another_torch(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    told = found(doctor._packages())["torch"]
    assert told.fails and told.do == "lenz needs 2.11 or newer, below 2.14"


def test_packages_that_are_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "llvmlite":
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.5.9"

    monkeypatch.setattr(importlib.metadata, "version", version)
    told = found(doctor._packages())
    assert told["llvmlite"].fails and told["llvmlite"].do.startswith("pip install llvmlite")
    assert told["triton"].do == "lenz needs 3.6 or newer"
    assert told["triton"].fails == bool(torch.version.cuda), "only GPUs need it"


def test_llvmlite_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def target() -> Any:
        raise ImportError("libLLVM is missing")

    monkeypatch.setattr(doctor, "host", lambda: SimpleNamespace(target=target))
    told = found(doctor._cpu())["CPU"]
    assert told.fails and "libLLVM is missing" in told.found and "llvmlite" in told.do


def test_more_threads_than_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    told = found(doctor._cpu())["threads"]
    assert not told.fails and "OMP_NUM_THREADS=" in told.do


def test_gpus_without_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert "install its driver" in found(doctor._gpus())["GPU"].do

    def old(pointer: Any) -> None:
        pointer._obj.value = 11080

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(cuDriverGetVersion=old))
    card = SimpleNamespace(name="Old", total_memory=2 << 30, major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    told = found(doctor._gpus())
    assert told["driver"].found == "for CUDA 11.8" and told["driver"].fails
    assert told["cuda:0"].found == "Old, 2 GiB, 7.5" and "8.0" in told["cuda:0"].do


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise ValueError("planted")

    torch.compiler.reset()
    monkeypatch.setattr("lenz.pipeline._compile", refused)
    told = doctor._run("cpu")
    assert told.fails and "planted" in told.found and "report it" in told.do


def test_the_versions_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for name, (least, end) in doctor.VERSIONS.items():
        wanted = f"{name}>={doctor._dotted(least)}" + (f",<{doctor._dotted(end)}" if end else "")
        assert re.search(rf'"{re.escape(wanted)}[";]', project), wanted
    assert f'requires-python = ">={doctor._dotted(doctor.PYTHON)}"' in project
