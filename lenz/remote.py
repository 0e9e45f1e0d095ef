"""A second cache behind the disk cache, on a Redis server that a fleet of machines shares.

Entries are machine code, so each is signed with the fleet's shared secret; an entry without a valid
signature is a miss. Reads wait for at most `WAIT` seconds. After a failure the server is left alone
for a while. Writes happen on a thread of their own.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any

from lenz.entry import FORMAT
from lenz.errors import Missing, UserError
from lenz.options import redacted
from lenz.private import reading

WAIT = 0.05
PAUSE = 60.0  # seconds without requests after a failure
KEPT = 30 * 86400  # seconds; the server's own limit on memory may be shorter
LARGEST = 64 << 20  # bytes per entry
FLUSH = 0.5  # seconds to wait for writes when the process ends
SHORTEST = 16  # bytes of a secret

Ask = Callable[[Any], Any]  # takes a client


class Remote:
    """The entries on the server at `url`, signed with `secret`. Thread-safe."""

    def __init__(self, url: str, secret: bytes) -> None:
        self._url, self._secret, self._place = url, secret, redacted("remote_cache", url)
        self._queues: dict[tuple[int, str], SimpleQueue[tuple[Ask, Future[Any]]]] = {}
        self._later = 0.0
        self._last: Future[Any] | None = None
        atexit.register(self.flush)

    def get(self, file: str) -> bytes | None:
        """The bytes stored under a file name; None without them, or without an answer."""
        if time.monotonic() < self._later:
            return None
        try:
            raw = self._ask("get", lambda c: c.get(_name(file))).result(WAIT)
        except Exception as e:  # noqa: BLE001  # of the library, the socket, the time
            self._pause(e)
            return None
        if raw is None or hmac.compare_digest(raw[:32], self._sign(file, raw[32:])):
            return None if raw is None else raw[32:]
        _say(f"entries of {self._place} are not signed with this secret and are ignored")
        return None

    def put(self, file: str, data: bytes) -> None:
        """Write bytes under a file name, in the background."""
        if time.monotonic() < self._later or len(data) > LARGEST:
            return
        signed = self._sign(file, data) + data
        self._last = self._ask("put", lambda c: c.set(_name(file), signed, ex=KEPT))

    def flush(self) -> None:
        """Wait briefly for pending writes."""
        if self._last is not None and time.monotonic() >= self._later:
            try:
                self._last.result(FLUSH)
            except Exception as e:  # noqa: BLE001  # as in `get`
                self._pause(e)

    def _sign(self, file: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, file.encode() + b"\0" + data, hashlib.sha256)

    def _ask(self, kind: str, ask: Ask) -> Future[Any]:
        """Ask the server on another thread: name resolution, for one, has no time limit."""
        key = os.getpid(), kind  # a fork does not inherit threads
        if key not in self._queues:
            queue = self._queues[key] = SimpleQueue()
            threading.Thread(target=self._serve, args=(queue,), daemon=True).start()
        answer: Future[Any] = Future()
        self._queues[key].put((ask, answer))
        return answer

    def _serve(self, queue: SimpleQueue[tuple[Ask, Future[Any]]]) -> None:
        client = None
        while True:
            ask, answer = queue.get()
            try:
                if time.monotonic() < self._later:
                    raise TimeoutError("it did not answer earlier")
                client = client or _client(self._url)
                answer.set_result(ask(client))
            except BaseException as e:  # noqa: BLE001  # for the caller
                client = None  # drop its socket, which may hold a late answer
                answer.set_exception(e)

    def _pause(self, e: Exception) -> None:
        self._later = time.monotonic() + PAUSE
        why = f"{type(e).__name__}: {e}".rstrip(": ")
        _say(f"{self._place} is not used for {PAUSE:.0f} s at a time: {why}")


@cache
def _say(what: str) -> None:
    """Warn once per text."""
    warnings.warn(f"lenz's remote cache: {what}", RuntimeWarning, stacklevel=2)


def _name(file: str) -> str:
    return f"lenz:{FORMAT}:{file}"


def _client(url: str) -> Any:
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    once = Retry(NoBackoff(), 0)
    return Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1, retry=once)


def remote_at(url: str, secret_file: str | None) -> Remote:
    """The cache at a URL. Raises UserError without a secret, Missing without the package."""
    told = redacted("remote_cache", url)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise UserError(f"remote_cache={told}: expected redis://host:port/number")
    if secret_file is None:
        hint = f"set remote_secret to a file with at least {SHORTEST} random bytes"
        raise UserError("a remote cache holds machine code and needs a shared secret", hint=hint)
    try:
        _client(url)  # now: to import its package takes longer than an answer may
    except ImportError:
        raise Missing("a remote cache needs redis-py", hint="pip install redis") from None
    except ValueError:  # its text has parts of the URL
        raise UserError(f"remote_cache={told}: not a URL for redis-py") from None
    return Remote(url, _secret(secret_file))


def _secret(path: str) -> bytes:
    with reading(path, hint="correct the option remote_secret") as file:
        secret = file.read(4096).strip()
    if len(secret) < SHORTEST:
        raise UserError(f"remote_secret={path}: expected a file of at least {SHORTEST} bytes")
    return secret
