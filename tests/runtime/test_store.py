"""The disk cache: whole entries or none, whatever is damaged, killed, full or raced."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from lenz.entry import FORMAT, HEADER, MAGIC, file_of, shard_of
from lenz.errors import InternalError
from lenz.runtime.store import Store, store_at


def child(code: str, *args: object) -> subprocess.Popen[str]:
    """Run `code` in a new process; `args` are in sys.argv[1:]."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def entries(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


def test_gives_back_what_was_put(tmp_path: Path) -> None:
    store = Store(tmp_path / "c")
    for data in (b"", b"x", bytes(range(256)) * 1000):
        store.put("object", "key", data)
        assert store.get("object", "key") == data
        assert Store(tmp_path / "c").get("object", "key") == data


def test_kind_and_key_both_tell_entries_apart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("object", "key", b"1")
    assert store.get("plan", "key") is None
    assert store.get("object", "key2") is None


def test_a_key_is_text_of_any_length_and_never_a_path(tmp_path: Path) -> None:
    store = Store(tmp_path / "c")
    for key in ("../../escape", "a" * 100_000, "", "line\nline\0nul", "é"):
        store.put("object", key, key.encode())
        assert store.get("object", key) == key.encode()
    assert all((tmp_path / "c") in p.parents for p in entries(tmp_path))


@pytest.mark.parametrize("kind", ["", "../up", "A", "a/b"])
def test_a_kind_is_a_plain_word(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InternalError, match="kind of cache entry"):
        Store(tmp_path).put(kind, "key", b"")


def test_every_flipped_byte_and_every_cut_is_a_miss(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("object", "key", b"some data")
    (path,) = entries(tmp_path)
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :])
        assert store.get("object", "key") is None, f"byte {n} is not protected"
        path.write_bytes(whole[:n])
        assert store.get("object", "key") is None, f"a file of {n} bytes is taken"
    path.write_bytes(whole + b"\0")
    assert store.get("object", "key") is None
    path.write_bytes(whole)
    assert store.get("object", "key") == b"some data"


def test_an_entry_under_another_name_is_a_miss(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("object", "a", b"data of a")
    (path_a,) = entries(tmp_path)
    store.put("object", "b", b"data of b")
    (path_b,) = set(entries(tmp_path)) - {path_a}
    path_b.write_bytes(path_a.read_bytes())
    assert store.get("object", "b") is None


def test_a_damaged_entry_is_replaced_by_the_next_put(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("object", "key", b"data")
    (path,) = entries(tmp_path)
    path.write_bytes(b"rubbish")
    store.put("object", "key", b"data")
    assert store.get("object", "key") == b"data"


def link(path: Path) -> None:
    """A link to a whole entry."""
    whole = path.with_name("whole")
    Store(path.parents[2]).put("object", "whole", b"data")
    path.symlink_to(whole)


def socket_at(path: Path) -> None:
    """A socket by a short name: addresses hold about 100 bytes."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind("s")
        os.rename("s", path)
    finally:
        os.chdir(before)
        os.close(before)


def huge(path: Path) -> None:
    """A sparse file that says of itself that it is whole, larger than the memory."""
    with path.open("wb") as file:
        size = 1 << 42
        file.write(HEADER.pack(MAGIC, FORMAT, size - HEADER.size, b"0" * 32))
        file.truncate(size)


THINGS: dict[str, Callable[[Path], object]] = {
    "folder": lambda p: p.mkdir(),
    "link": link,
    "link to nowhere": lambda p: p.symlink_to("nowhere"),
    "link to itself": lambda p: p.symlink_to(p.name),
    "pipe": os.mkfifo if hasattr(os, "mkfifo") else Path.mkdir,
    "socket": socket_at,
    "device": lambda p: os.mknod(p, stat.S_IFCHR | 0o600, os.makedev(1, 5)),  # /dev/zero
    "huge file": huge,
    "file that nobody may read": lambda p: p.touch(0),
}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such things")
@pytest.mark.parametrize("thing", THINGS)
def test_what_is_no_entry_is_a_miss_and_replaced(tmp_path: Path, thing: str) -> None:
    store = Store(tmp_path / "c")
    store.put("object", "key", b"data")
    (path,) = entries(tmp_path)
    path.unlink()
    try:
        THINGS[thing](path)
    except PermissionError:
        pytest.skip("only root makes devices")
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the store waits"))
    signal.alarm(20)
    try:
        assert store.get("object", "key") is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.put("object", "key", b"new")
            store.put("object", "other", b"else")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert store.get("object", "key") == (None if thing == "folder" else b"new")
    assert store.get("object", "other") == b"else"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such things")
@pytest.mark.parametrize("thing", ["pipe", "folder", "link to itself", "socket"])
def test_a_full_folder_with_strange_things_is_emptied(tmp_path: Path, thing: str) -> None:
    store = Store(tmp_path, limit=16)
    keys = [str(n) for n in range(40)]  # some for each of the 16 folders
    for key in keys:
        store.put("object", key, b"x" * 100)
    for path in entries(tmp_path):
        THINGS[thing](path.with_name("." + path.name[1:]))
        THINGS[thing](path.with_name("0" + path.name[1:]))
    for key in keys:
        store.put("object", key, b"y" * 100)
        assert store.get("object", key) == b"y" * 100


def test_an_entry_larger_than_the_cache_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lenz.runtime.store.LIMIT_BYTES", 1000)
    Store(tmp_path / "c").put("object", "key", b"x" * 1000)
    assert not entries(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
def test_only_the_owner_can_read_or_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Store(tmp_path / "a" / "b").put("object", "key", b"data")
    finally:
        os.umask(before)
    for path in (tmp_path / "a").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


FOLDERS = [(), (f"v{FORMAT}",), (f"v{FORMAT}", "*")]  # the root, and those on the way to an entry


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
@pytest.mark.parametrize("parts", FOLDERS, ids=["root", "version", "shard"])
@pytest.mark.parametrize("fault", ["mode", "owner", "link"])
def test_a_folder_that_others_can_change_is_not_used(
    tmp_path: Path, parts: tuple[str, ...], fault: str
) -> None:
    """Also if it was good when the store looked before."""
    store = Store(tmp_path / "c")
    store.put("object", "key", b"data")
    assert store.get("object", "key") == b"data"
    (folder,) = (tmp_path / "c").glob("/".join(parts)) if parts else [tmp_path / "c"]
    match fault:
        case "mode":
            folder.chmod(0o777)
        case "owner" if os.geteuid() != 0:
            pytest.skip("only root gives a folder away")
        case "owner":
            os.chown(folder, 65534, 65534)
        case "link":
            folder.symlink_to(folder.rename(tmp_path / "elsewhere"))
    assert store.get("object", "key") is None
    with pytest.warns(RuntimeWarning, match="lenz keeps no compiled code"):
        store.put("object", "key", b"data")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such links")
def test_the_root_may_be_a_link_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(0o700)
    (tmp_path / "c").symlink_to(tmp_path / "disk")
    Store(tmp_path / "c").put("object", "key", b"data")
    assert Store(tmp_path / "c").get("object", "key") == b"data"


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("only Linux lists descriptors")
    store, before = Store(tmp_path), len(os.listdir("/proc/self/fd"))
    store.put("object", "key", b"data")
    (path,) = entries(tmp_path)
    for change in (lambda: None, path.unlink, path.mkdir, lambda: tmp_path.chmod(0o777)):
        change()
        store.get("object", "key")
    with pytest.warns(RuntimeWarning):
        store.put("object", "key", b"data")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
def test_an_entry_that_others_can_write_to_is_a_miss(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("object", "key", b"data")
    (path,) = entries(tmp_path)
    path.chmod(0o666)
    assert store.get("object", "key") is None


def test_no_folder_means_no_cache_and_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    none_can_be_made(Store(tmp_path / "file" / "cache"))


def test_a_path_that_is_too_long_means_one_warning(tmp_path: Path) -> None:
    """Of more folders than Python may recurse into, and of more bytes than a path may have."""
    none_can_be_made(Store(str(tmp_path / ("d" * 300)) + "/d" * 3000))


def none_can_be_made(store: Store) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for n in range(5):
            store.put("object", str(n), b"data")
            assert store.get("object", str(n)) is None
    assert len(seen) == 1
    assert "LENZ_CACHE_DIR" in str(seen[0].message)


def test_one_store_per_folder_and_process(tmp_path: Path) -> None:
    assert store_at(str(tmp_path)) is store_at(str(tmp_path))


ONE_WARNING = """
    import os, sys, warnings
    from lenz.runtime.store import Store
    store = Store(sys.argv[1])
    {prepare}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for n in range(4):
            store.put("object", f"new {{n}}", b"x" * 100_000)
            assert store.get("object", f"new {{n}}") is None
    assert len(seen) == 1, seen
    assert store.get("object", "old") == b"kept"
    print(seen[0].message)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no resource limits")
def test_a_full_disk_means_no_cache_and_one_warning(tmp_path: Path) -> None:
    Store(tmp_path).put("object", "old", b"kept")
    # A limit on file size makes the second write(2) fail, after a first one that was partly done.
    prepare = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    run = child(ONE_WARNING.format(prepare=prepare), tmp_path)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert "too large" in out
    assert len(entries(tmp_path)) == 1, "a partly written file was left behind"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
def test_a_read_only_folder_still_serves_hits(tmp_path: Path) -> None:
    Store(tmp_path).put("object", "old", b"kept")
    folders = [tmp_path, *(p for p in tmp_path.rglob("*") if p.is_dir())]
    nobody = 65534
    if os.geteuid() == 0:  # permissions do not hold for root: the child becomes somebody else
        for path in [*folders, *entries(tmp_path)]:
            os.chown(path, nobody, nobody)
        for above in tmp_path.parents:  # pytest's own folders, which only root may enter
            if above == Path(tempfile.gettempdir()).resolve():
                break
            above.chmod(above.stat().st_mode | 0o011)
    for folder in folders:
        folder.chmod(0o500)
    run = child(ONE_WARNING.format(prepare=f"os.geteuid() or os.setuid({nobody})"), tmp_path)
    out, err = run.communicate(timeout=60)
    for folder in folders:
        folder.chmod(0o700)
    assert run.returncode == 0, err
    assert "ermission denied" in out


KILLED_IN_WRITE = """
    import os, signal, sys
    from lenz.runtime.store import Store
    store = Store(sys.argv[1])
    real = os.write
    def die(file, data):
        real(file, bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "write":
        os.write = die
    else:
        setattr(os, sys.argv[2], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    store.put("object", "key", b"new" * 100_000)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_writer_killed_at_any_call_loses_nothing(tmp_path: Path, call: str) -> None:
    store = Store(tmp_path)
    store.put("object", "key", b"old")
    run = child(KILLED_IN_WRITE, tmp_path, call)
    run.communicate(timeout=60)
    assert run.returncode == -9
    assert store.get("object", "key") == b"old"
    left = [p for p in entries(tmp_path) if p.name.startswith(".")]
    assert len(left) == 1
    # Its temporary file goes with the first write to the folder after an hour.
    store.put("object", "key", b"newer")
    assert left[0].exists()
    os.utime(left[0], (0, 0))
    store.put("object", "key", b"newest")
    assert not left[0].exists()
    assert store.get("object", "key") == b"newest"


WRITER = """
    import sys
    from lenz.runtime.store import Store
    store = Store(sys.argv[1])
    n = int(sys.argv[2])
    store.put("object", "key", bytes([n]) * 300_000)
    print("ready", flush=True)
    for step in range(int(sys.argv[3])):
        store.put("object", "key", bytes([n, step % 256]) * 150_000)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_writers_killed_at_random_never_leave_a_part(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for n in range(6):
        run = child(WRITER, tmp_path, n, 1_000_000)
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        time.sleep(0.003 * n)
        run.kill()
        run.communicate(timeout=60)
        data = store.get("object", "key")
        assert data is not None and len(data) == 300_000
        assert data in (bytes([n]) * 300_000, data[:2] * 150_000) and data[0] == n


WRITERS = """
    import os, sys
    from lenz.runtime.store import Store
    store, (begin, go) = Store(sys.argv[1]), os.pipe()
    for n in range(64):
        if os.fork() == 0:
            os.close(go)
            os.read(begin, 1)  # all begin at once, when the parent closes its end
            for step in range(8):
                store.put("object", "key", bytes([n, step]) * 150_000)
            os._exit(0)
    os.close(go)
    codes = [os.wait()[1] for _ in range(64)]
    sys.exit(any(codes))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_64_processes_write_one_entry_at_once(tmp_path: Path) -> None:
    run = child(WRITERS, tmp_path)
    store, seen = Store(tmp_path), 0
    while run.poll() is None:
        data = store.get("object", "key")
        assert (data is None and not seen) or (data is not None and data == data[:2] * 150_000)
        seen += data is not None
    _, err = run.communicate(timeout=60)
    assert run.returncode == 0 and not err, err
    assert seen and store.get("object", "key") is not None
    assert len(entries(tmp_path)) == 1


def test_the_oldest_entries_go_when_the_limit_is_reached(tmp_path: Path) -> None:
    data = b"x" * 1000
    store = Store(tmp_path, limit=16 * 5 * (1000 + HEADER.size))
    for n in range(400):
        store.put("object", str(n), data)
        newest = max(entries(tmp_path), key=lambda p: p.stat().st_mtime_ns)
        os.utime(newest, (1000 + n, 1000 + n))
    per_folder = [len(entries(f)) for f in (tmp_path / f"v{FORMAT}").iterdir()]
    assert max(per_folder) == 5 and sum(per_folder) == 80
    assert store.get("object", "399") == data
    assert store.get("object", "0") is None


def test_an_entry_above_the_limit_is_kept_until_the_next(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=16)
    store.put("object", "key", b"x" * 10_000)
    assert store.get("object", "key") == b"x" * 10_000


def test_a_hit_makes_an_old_entry_young(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("object", "key", b"data")
    (path,) = entries(tmp_path)
    os.utime(path, (1000, 1000))
    assert store.get("object", "key") == b"data"
    assert path.stat().st_mtime > 1000


@pytest.mark.parametrize("jump", [-400, 400], ids=["back", "forward"])
def test_a_clock_that_jumps(tmp_path: Path, jump: int) -> None:
    """Entries stay readable, get a time that counts again, and old temporary files still go."""
    store = Store(tmp_path, limit=16 * 4 * (1000 + HEADER.size))
    then = time.time() - jump * 86400
    for n in range(160):
        store.put("object", str(n), bytes([n]) * 1000)
    left = entries(tmp_path)[0].with_name(".left")
    left.write_bytes(b"part")
    for path in entries(tmp_path):
        os.utime(path, (then, then))
    kept = [n for n in range(160) if store.get("object", str(n)) == bytes([n]) * 1000]
    assert len(kept) == 64, "every entry that is there is read, whatever its time"
    now = time.time()
    assert all(abs(p.stat().st_mtime - now) < 3600 for p in entries(tmp_path) if p != left)
    file = next(p for p in entries(tmp_path) if p != left and p.parent == left.parent)
    store.write(file.name, b"again")
    assert not left.exists(), "a temporary file of another time is nobody's"


def test_entries_of_the_future_go_first(tmp_path: Path) -> None:
    """They were written before the clock was set back, and would stay for ever as the youngest."""
    store = Store(tmp_path, limit=16 * 3 * (1000 + HEADER.size))
    keys = [str(n) for n in range(400) if shard_of(file_of("object", str(n)))[0] == "0"][:4]
    for n, key in enumerate(keys[:3]):
        store.put("object", key, b"x" * 1000)
        (path,) = (p for p in entries(tmp_path) if p.name == file_of("object", key))
        when = time.time() + (400 * 86400 if n == 1 else -60 * n)
        os.utime(path, (when, when))
    store.put("object", keys[3], b"x" * 1000)
    assert [store.get("object", key) is not None for key in keys] == [True, False, True, True]
