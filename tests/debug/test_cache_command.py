"""`python -m lenz cache`: what people do with the disk cache."""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lenz import keys
from lenz.cli import main
from lenz.runtime.store import Store, store_at

Say = Callable[..., str]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs `cache` with its arguments on a folder of its own; gives what it prints."""
    monkeypatch.setenv("LENZ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LENZ_CACHE", raising=False)

    def run(*arguments: str, status: int = 0) -> str:
        assert main(["cache", *arguments]) == status
        said = capsys.readouterr()
        return said.out + said.err

    return run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = store_at(str(tmp_path / "cache"))
    for k in range(3):
        made.put("graph", f"key {k}", bytes(1000 * k))
    made.put("object", "key", b"code")
    return made


def test_path_is_where_the_option_says(say: Say, tmp_path: Path) -> None:
    assert say("path").strip() == str(tmp_path / "cache")


def test_stats_count_entries_by_kind(say: Say, store: Store) -> None:
    lines = [line.split() for line in say("stats").splitlines()]
    assert [line[:2] for line in lines[1:]] == [["graph", "3"], ["object", "1"], ["all", "4"]]


def test_stats_of_no_cache(say: Say) -> None:
    assert say("stats").splitlines()[-1].split() == ["all", "0", "0.00"]


def test_verify_deletes_what_is_damaged(say: Say, store: Store, tmp_path: Path) -> None:
    assert "4 entries are whole, 0 were damaged" in say("verify")
    (entry,) = (tmp_path / "cache").rglob("*.object")
    entry.write_bytes(entry.read_bytes()[:-1] + b"x")
    assert "3 entries are whole, 1 were damaged" in say("verify", status=1)
    assert not entry.exists()
    assert "3 entries are whole, 0 were damaged" in say("verify")


@pytest.mark.filterwarnings("ignore:lenz keeps no compiled code")
def test_a_folder_that_is_not_used_is_told(say: Say, store: Store, tmp_path: Path) -> None:
    """Nothing is counted as deleted or added that stays as it was."""
    bundle = str(tmp_path / "bundle.zip")
    say("export", bundle)
    (entry,) = (tmp_path / "cache").rglob("*.object")
    entry.write_bytes(b"damaged")
    entry.parent.chmod(0o777)
    for what in ("stats", "clear", "verify", "export"):
        why = f"cannot read the cache in {tmp_path / 'cache'}: others own it"
        assert why in say(what, *[bundle] * (what == "export"), status=1)
    assert "the cache cannot be written; " in say("import", bundle, status=1)


@pytest.mark.parametrize(("what", "name"), [("clear", "graph"), ("verify", "object")])
def test_a_file_that_cannot_be_deleted_is_not_counted(
    what: str, name: str, say: Say, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    next((tmp_path / "cache").rglob(f"*.{name}")).write_bytes(b"damaged")
    monkeypatch.setattr("lenz.runtime.store.unlink", refused)
    said = say(what, status=1)
    assert "cannot delete from the cache in " in said and "Permission denied" in said


def test_clear_leaves_other_files(say: Say, store: Store, tmp_path: Path) -> None:
    other = next((tmp_path / "cache").rglob("*.object")).with_name("mine.txt")
    other.write_text("not lenz's")
    assert "4 entries deleted" in say("clear")
    assert [f for f in (tmp_path / "cache").rglob("*") if f.is_file()] == [other]


def test_a_bundle_carries_what_is_compiled(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine's empty cache compiles nothing after the import."""
    monkeypatch.setattr(keys, "sources", lambda again=False: "one version")
    x = torch.randn(4, 8)

    def soft(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.sin(), -1)

    def compiled(folder: str) -> torch.Tensor:
        torch.compiler.reset()
        options: dict[str, Any] = {"cache_dir": str(tmp_path / folder), "cache": True}
        made: torch.Tensor = torch.compile(soft, backend="lenz", options=options)(x)
        return made

    compiled("cache")
    bundle = str(tmp_path / "bundle.zip")
    assert "entries written" in say("export", bundle)
    monkeypatch.setenv("LENZ_CACHE_DIR", str(tmp_path / "other"))
    assert "entries added" in say("import", bundle)

    def refused(*args: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("lenz.pipeline.compile_program", refused)
    torch.testing.assert_close(compiled("other"), soft(x))


def test_a_damaged_entry_is_not_exported(say: Say, store: Store, tmp_path: Path) -> None:
    (entry,) = (tmp_path / "cache").rglob("*.object")
    entry.write_bytes(b"")
    assert "3 entries written" in say("export", str(tmp_path / "bundle.zip"))


@pytest.mark.parametrize(
    "name", ["../../.profile", "/etc/x", "0/" + "a" * 64 + ".graph", "a.graph"]
)
def test_a_bundle_with_other_names_is_refused(say: Say, name: str, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.zip"
    with zipfile.ZipFile(bundle, "w") as made:
        made.writestr(name, b"data")
    assert "is not a lenz bundle" in say("import", str(bundle), status=1)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", ["folder", "pipe", "lzma", "name", "method"])
def test_other_bundles_are_refused(say: Say, kind: str, tmp_path: Path) -> None:
    """A folder, a pipe that nobody writes, and zip files that Python cannot read."""
    bundle, name = tmp_path / "bundle", "ab" + 62 * "0" + ".graph"
    if kind == "folder":
        bundle.mkdir()
    elif kind == "pipe":
        os.mkfifo(bundle)
    else:
        with zipfile.ZipFile(bundle, "w", zipfile.ZIP_LZMA) as made:
            made.writestr(name if kind != "name" else "\xe9" + name, bytes(99))
        data, at = bundle.read_bytes(), len(name) + 30
        if kind == "lzma":
            bundle.write_bytes(data[: at + 9] + b"wrong" + data[at + 14 :])
        if kind == "method":
            bundle.write_bytes(data.replace(b"\x0e\0", b"\x63\0"))
        if kind == "name":
            bundle.write_bytes(data.replace("\xe9".encode(), b"\xff\xff"))
    what = "cannot read" if kind in ("folder", "pipe") else "is damaged or not a lenz bundle: "
    assert what in say("import", str(bundle), status=1)


def test_every_cut_bundle_is_refused(say: Say, store: Store, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.zip"
    say("export", str(bundle))
    whole = bundle.read_bytes()
    for size in range(0, len(whole), 37):
        bundle.write_bytes(whole[:size])
        assert "lenz bundle" in say("import", str(bundle), status=1)


def test_flipped_bytes_of_a_bundle_change_no_entry(say: Say, store: Store, tmp_path: Path) -> None:
    bundle, known = tmp_path / "bundle.zip", {f: store.read(f) for f, *_ in store.files()}
    say("export", str(bundle))
    whole = bundle.read_bytes()
    for at in range(0, len(whole), 11):
        bundle.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        main(["cache", "import", str(bundle)])
    assert known == {f: store.read(f) for f, *_ in store.files()}


def test_a_bundle_is_written_through_no_link(
    say: Say, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may make files beside it, and guess the number of the process."""
    other, link = tmp_path / "other", tmp_path / f".lenz-{os.getpid()}"
    other.write_bytes(b"precious")
    for name in (link, tmp_path / "bundle.zip"):
        name.symlink_to(other)
    assert "4 entries written" in say("export", str(tmp_path / "bundle.zip"))
    assert other.read_bytes() == b"precious" and not (tmp_path / "bundle.zip").is_symlink()
    assert {f.name for f in tmp_path.iterdir()} == {"cache", "other", "bundle.zip", link.name}


@pytest.mark.diagonal(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export",), "takes a file"),
        (("stats", "x"), "takes no file"),
        (("import", "nowhere.zip"), "cannot read 'nowhere.zip': No such file"),
        (("export", "nowhere/at/all.zip"), "cannot write 'nowhere/at/all.zip'"),
        (("export", "."), "cannot write '.': it is not a regular file"),
    ],
)
def test_wrong_usage_is_told_in_a_line(say: Say, arguments: tuple[str, ...], message: str) -> None:
    assert message in say(*arguments, status=1)


def test_the_size_limit_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lenz.options import Options
    from lenz.runtime.store import store_in

    store = store_in(Options.from_environment({"cache_dir": str(tmp_path), "cache_mb": 1}))
    assert store is not None
    for k in range(256):
        store.put("object", str(k), bytes(16 << 10))
    assert sum(size for _, size, _ in store.files()) <= 2 << 20
