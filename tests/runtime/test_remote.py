"""The cache on a Redis server: shared by those with its secret, and no harm when it fails.

Tests with a real server need `redis-server` on the path, and are skipped without one.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lenz import keys, remote
from lenz.entry import FORMAT, file_of
from lenz.errors import UserError
from lenz.options import Options
from lenz.remote import Remote, remote_at
from lenz.runtime.store import Store, store_in

redis = pytest.importorskip("redis")
SECRET = b"a secret of the fleet"
pytestmark = pytest.mark.filterwarnings("ignore:lenz's remote cache")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that run tests are busy: a good answer may take a while there."""
    monkeypatch.setattr(remote, "WAIT", 10.0)
    remote._say.cache_clear()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def started(port: int, folder: Path) -> subprocess.Popen[bytes]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on the path")
    where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    command = [program, *where, "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port)
    for _ in range(200):
        try:
            client.ping()
            return process
        except redis.ConnectionError:
            time.sleep(0.05)
    raise AssertionError("redis-server does not answer")


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """The port of a real server."""
    found = free_port()
    process = started(found, tmp_path)
    yield found
    process.kill()
    process.wait()


def at(port: int, secret: bytes = SECRET) -> Remote:
    return Remote(f"redis://127.0.0.1:{port}/0", secret)


def test_what_one_machine_puts_another_gets(port: int, tmp_path: Path) -> None:
    one, other = (Store(tmp_path / n, remote=at(port)) for n in ("one", "other"))
    one.put("object", "key", b"code")
    assert one._remote is not None
    one._remote.flush()
    assert other.get("object", "key") == b"code"
    assert other.get("object", "another key") is None
    # It is on the disk now.
    assert Store(tmp_path / "other").get("object", "key") == b"code"


def test_a_graph_is_compiled_once_in_a_fleet(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "sources", lambda again=False: "one version")
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    x = torch.randn(4, 8)

    def soft(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.cos(), -1)

    def compiled(machine: str) -> torch.Tensor:
        torch.compiler.reset()
        options: dict[str, str | int | bool | Callable[..., object]] = {
            "cache": True,
            "cache_dir": str(tmp_path / machine),
            "remote_cache": f"redis://127.0.0.1:{port}/0",
            "remote_secret": str(secret),
        }
        store = store_in(Options.from_environment(options))
        made: torch.Tensor = torch.compile(soft, backend="lenz", options=options)(x)
        assert store is not None and store._remote is not None
        store._remote.flush()
        return made

    compiled("one")

    def refused(*args: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("lenz.pipeline.compile_program", refused)
    torch.testing.assert_close(compiled("other"), soft(x))


def test_entries_of_others_are_not_used(port: int) -> None:
    """Signed with another secret, under another name, changed, cut, or not at all."""
    mine, file = at(port), file_of("object", "key")
    mine.put(file, b"code")
    mine.flush()
    client, name = redis.Redis(port=port), f"lenz:{FORMAT}:{file}"
    right = client.get(name)
    assert mine.get(file) == b"code" and at(port, b"another secret of 16").get(file) is None
    elsewhere = file_of("object", "other")
    wrong = [right[:-1] + b"x", b"x" + right[1:], right[:-1], right[:10], b"", b"code"]
    for data in wrong:
        client.set(name, data)
        assert mine.get(file) is None
    client.set(f"lenz:{FORMAT}:{elsewhere}", right)
    assert mine.get(elsewhere) is None


def test_a_server_that_comes_back_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    found, file = free_port(), file_of("object", "key")
    process, mine = started(found, tmp_path), at(found)
    mine.put(file, b"code")
    mine.flush()
    process.kill()
    process.wait()
    assert mine.get(file) is None
    process = started(found, tmp_path)
    try:
        mine.put(file, b"code")
        mine.flush()
        assert mine.get(file) == b"code"
    finally:
        process.kill()
        process.wait()


class Wrong:
    """A server that gives every client the same bytes, or nothing at all."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.clients = answer, 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.open: list[socket.socket] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            self.clients += 1
            self.open.append(client)
            if self.answer:
                client.sendall(self.answer)

    def close(self) -> None:
        for s in (self.socket, *self.open):
            s.close()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$99999999999\r\nxx", b"\x00" * 999]
)
def test_a_server_that_is_none_is_left_alone(
    answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs, speaks something else, or promises without end: one question, one warning."""
    monkeypatch.setattr(remote, "WAIT", 0.05)
    server = Wrong(answer)
    try:
        store = Store(tmp_path, remote=at(server.port))
        with pytest.warns(RuntimeWarning, match="is not used for 60 s"):
            assert store.get("object", "key") is None
        before = server.clients
        for k in range(50):
            store.put("object", str(k), b"code")
            assert store.get("object", f"no {k}") is None
        assert store.get("object", "7") == b"code" and server.clients == before
    finally:
        server.close()


def test_no_server_at_all(tmp_path: Path) -> None:
    store = Store(tmp_path, remote=at(free_port()))
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert store.get("object", "key") is None
    store.put("object", "key", b"code")
    assert store.get("object", "key") == b"code"


@pytest.mark.parametrize("url", ["redis://me:hunter2@127.0.0.1:1/0", "unix://no?password=hunter2"])
def test_a_password_is_not_told(url: str) -> None:
    with pytest.warns(RuntimeWarning) as said:
        Remote(url, SECRET).get(file_of("object", "key"))
    (text,) = [str(w.message) for w in said]
    assert "hunter2" not in text and ("127.0.0.1" in text or "unix://no" in text)


@pytest.mark.parametrize("url", ["redis://me:hunter2/x@host", "http://:hunter2@host"])
def test_a_password_in_a_wrong_url_is_not_told(url: str) -> None:
    with pytest.raises(UserError, match="host: ") as caught:
        remote_at(url, "none")
    assert "hunter2" not in str(caught.value)


def test_a_fork_asks_with_threads_of_its_own(port: int) -> None:
    mine, file = at(port), file_of("object", "key")
    mine.put(file, b"code")
    mine.flush()
    child = os.fork()
    if child == 0:
        os._exit(0 if mine.get(file) == b"code" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_remote_cache_needs_a_secret(tmp_path: Path) -> None:
    url, short, pipe = "redis://localhost", tmp_path / "short", tmp_path / "pipe"
    short.write_bytes(b"123")
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="needs a shared secret"):
        remote_at(url, None)
    for file, why in (
        (short, "at least 16"),
        (pipe, "not a regular"),
        (tmp_path / "no", "No such"),
    ):
        with pytest.raises(UserError, match=why):
            remote_at(url, str(file))
    with pytest.raises(UserError, match="expected redis://"):
        remote_at("http://localhost", str(short))
