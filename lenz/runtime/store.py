"""The disk cache: bytes under the hash of a key.  The only place that writes the cache.

What holds at every moment, whatever dies or runs beside us:

- An entry is whole or absent.  It is written to a temporary file, synced, then renamed.
- A file that is damaged, cut short, of another version or of another user is a miss, no error.
- Only this user can read or write an entry, and nothing is read from a folder that others can
  write to: entries are code.
- A write that fails (full disk, read-only folder) ends writing for this process, with one warning.

An entry is a header (magic, format version, length), the SHA-256 of name and data, the data.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import threading
import time
import warnings
from contextlib import suppress
from functools import cache

from lenz.errors import InternalError

MAGIC = b"lenz\x89\r\n\x1a"
FORMAT = 1
HEADER = struct.Struct("<8sIQ32s")
KIND = re.compile(r"[a-z][a-z0-9_]*")

# Entries are spread over 16 folders and each folder is bounded by itself, so that a write looks
# at a sixteenth of the cache.  A compiled graph takes 10 to 200 KiB.
SHARDS = 16
LIMIT_BYTES = 1 << 30
STALE_SECONDS = 3600
DAY_SECONDS = 86400


class Store:
    """A cache of bytes in the folder `root`, safe to share between threads and processes.

    `limit` bounds its size in bytes: when a sixteenth of it is used up by one of its 16 folders,
    the entries of that folder that were unused for longest go first.
    """

    __slots__ = ("_limit", "_lock", "_root", "_trusted", "_writes")

    def __init__(self, root: str | os.PathLike[str], *, limit: int = LIMIT_BYTES) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._limit = limit
        self._lock = threading.Lock()
        self._writes = True
        self._trusted: bool | None = None

    def get(self, kind: str, key: str) -> bytes | None:
        """Return the data last put under `kind` and `key`, or None if there is no whole entry."""
        path, name = self._place(kind, key)
        try:
            file = os.open(path, os.O_RDONLY | _NOFOLLOW | _BINARY)
        except OSError:
            return None
        try:
            if not self._is_trusted():
                return None
            info = os.fstat(file)
            if not (stat.S_ISREG(info.st_mode) and _is_private(info)):
                return None
            data = _unpack(_read(file, info.st_size), name)
        except OSError:
            return None
        finally:
            os.close(file)
        if data is not None and time.time() - info.st_mtime > DAY_SECONDS:
            with suppress(OSError):  # a folder we may only read: the age stays as it is
                os.utime(path)
        return data

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Keep `data` under `kind` and `key`, in place of what was there.

        A failure to write is no error: it warns once, and later calls do nothing.
        """
        path, name = self._place(kind, key)
        if not self._writes:
            return
        try:
            self._make_folders(os.path.dirname(path))
            if not self._is_trusted():
                self._stop("others can write to it, or own it")
                return
            _write(path, _pack(data, name))
            self._evict(os.path.dirname(path), os.path.basename(path))
        except OSError as error:
            self._stop(error.strerror or type(error).__name__)

    def _place(self, kind: str, key: str) -> tuple[str, bytes]:
        """Return the path of an entry and the name that its checksum covers."""
        if not KIND.fullmatch(kind):
            raise InternalError(f"{kind!r} is no kind of cache entry", rule="store-kind")
        name = f"{kind}\0{key}".encode()
        digest = hashlib.sha256(name).hexdigest()
        shard = f"{int(digest[:2], 16) % SHARDS:x}"
        return os.path.join(self._root, f"v{FORMAT}", shard, f"{digest}.{kind}"), name

    def _make_folders(self, folder: str) -> None:
        """Make `folder` and what is missing above it, for this user alone."""
        if os.path.isdir(folder):
            return
        above = os.path.dirname(folder)
        if above != folder:
            self._make_folders(above)
        with suppress(FileExistsError):  # another process was faster
            os.mkdir(folder, 0o700)

    def _is_trusted(self) -> bool:
        """True if no other user can put files into the root; asked of the system once."""
        if self._trusted is None:
            self._trusted = _is_private(os.stat(self._root))
        return self._trusted

    def _stop(self, why: str) -> None:
        """Write no more, and say so the first time."""
        with self._lock:
            first, self._writes = self._writes, False
        if first:
            warnings.warn(
                f"lenz keeps no compiled code in {self._root}: {why}. Every process compiles "
                "anew. Set LENZ_CACHE_DIR to another folder, or LENZ_CACHE=0 for silence.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _evict(self, folder: str, newest: str) -> None:
        """Delete the oldest entries of one folder until it is within its share, never `newest`.

        Temporary files that a killed process left behind go as well.
        """
        now = time.time()
        used = 0
        found: list[tuple[float, int, str]] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):  # another process deletes as well, or holds it open
                    info = entry.stat(follow_symlinks=False)
                    used += info.st_size
                    if entry.name.startswith("."):
                        if now - info.st_mtime > STALE_SECONDS:
                            os.unlink(entry.path)
                    elif entry.name != newest:
                        found.append((info.st_mtime, info.st_size, entry.path))
        for _, size, path in sorted(found):
            if used <= self._limit // SHARDS:
                return
            with suppress(OSError):
                os.unlink(path)
            used -= size


@cache
def store_at(root: str) -> Store:
    """Return the one store of this process for `root`, so that each folder warns at most once."""
    return Store(root)


_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def _is_private(info: os.stat_result) -> bool:
    """True if the file is ours and nobody else can write it."""
    if not hasattr(os, "geteuid"):  # Windows: the user's own folder has its own access list
        return True
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _pack(data: bytes, name: bytes) -> bytes:
    return HEADER.pack(MAGIC, FORMAT, len(data), _checksum(data, name)) + data


def _unpack(raw: bytes, name: bytes) -> bytes | None:
    """Return the data of an entry, or None unless every byte of it is as `_pack` wrote it."""
    if len(raw) < HEADER.size:
        return None
    magic, version, length, checksum = HEADER.unpack_from(raw)
    data = raw[HEADER.size :]
    if magic != MAGIC or version != FORMAT or length != len(data):
        return None
    return data if checksum == _checksum(data, name) else None


def _checksum(data: bytes, name: bytes) -> bytes:
    digest = hashlib.sha256(hashlib.sha256(name).digest())
    digest.update(data)
    return digest.digest()


def _read(file: int, size: int) -> bytes:
    """Read `size` bytes, or fewer if the file ends before."""
    parts = []
    while size > 0 and (part := os.read(file, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(path: str, raw: bytes) -> None:
    """Put `raw` at `path` in one step: readers see the old file or the new one, never a part."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name[:16]}-{os.getpid()}-{os.urandom(6).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _BINARY
    file = os.open(temporary, flags, 0o600)
    try:
        try:
            left = memoryview(raw)
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
