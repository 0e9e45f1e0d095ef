"""The disk cache: bytes under the hash of a key. Only this file writes the cache.

Invariants at every moment, whatever crashes or runs at the same time:

- An entry is complete or absent. It is written to a temporary file, synced, then renamed.
- A file that is damaged, truncated, of another version or of another user is a miss, not an error.
- Only this user can read or write an entry. Nothing is read from a folder that others can write to,
  because entries are code. This is checked each time, from the root down, by descriptors.
- Nothing blocks: a pipe, a device or a folder in place of an entry is a miss.
- After a failed write (full disk, read-only folder) this process stops writing, with one warning.

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
from contextlib import AbstractContextManager, suppress
from functools import cache

from lenz.errors import InternalError
from lenz.options import Options
from lenz.private import Folder, folder, is_private, opened, unlink, write

MAGIC = b"lenz\x89\r\n\x1a"
FORMAT = 2
HEADER = struct.Struct("<8sIQ32s")
KIND = re.compile(r"[a-z][a-z0-9_]*")

# Entries are spread over 16 folders. Each folder has its own limit, so that a write scans only a
# sixteenth of the cache. A compiled graph takes 10 to 200 KiB.
SHARDS = 16
LIMIT_BYTES = 1 << 30
STALE_SECONDS = 3600
DAY_SECONDS = 86400


class Store:
    """A cache of bytes in the folder `root`, safe to share between threads and processes.

    `limit` bounds its size in bytes. When one of the 16 folders exceeds its sixteenth, its least
    recently used entries are deleted first.
    """

    __slots__ = ("_limit", "_lock", "_root", "_writes")

    def __init__(self, root: str | os.PathLike[str], *, limit: int = LIMIT_BYTES) -> None:
        self._root = os.path.realpath(root)  # the root may be a link, folders below it may not
        self._limit = limit
        self._lock = threading.Lock()
        self._writes = True

    def get(self, kind: str, key: str) -> bytes | None:
        """Return the data last put under `kind` and `key`, or None without a complete entry."""
        shard, file, name = _place(kind, key)
        try:
            with self._folder(shard) as at, opened(at, file, os.O_RDONLY) as entry:
                info = os.fstat(entry)
                # A file larger than the whole cache is not an entry, and would fill the memory.
                is_entry = stat.S_ISREG(info.st_mode) and is_private(info)
                if not is_entry or info.st_size > LIMIT_BYTES:
                    return None
                data = _unpack(_read(entry, info.st_size), name)
                if data is not None and time.time() - info.st_mtime > DAY_SECONDS:
                    with suppress(OSError):  # a read-only folder: the age stays as it is
                        os.utime(at.prefix + file, dir_fd=at.fd)
                return data
        except OSError:
            return None

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Store `data` under `kind` and `key`, replacing any earlier entry.

        A failure to write is not an error: it warns once, and later calls do nothing.
        """
        shard, file, name = _place(kind, key)
        if not self._writes or HEADER.size + len(data) > LIMIT_BYTES:
            return
        try:
            with self._folder(shard, make=True) as at:
                with suppress(IsADirectoryError):  # a folder in place of the entry: it stays a miss
                    write(at, file, _pack(data, name), sync=True)
                self._evict(at, file)
        except OSError as error:
            self._stop(error.strerror or type(error).__name__)

    def _folder(self, shard: str, make: bool = False) -> AbstractContextManager[Folder]:
        return folder(self._root, f"v{FORMAT}", shard, make=make)

    def _stop(self, why: str) -> None:
        """Stop writing, and warn the first time."""
        with self._lock:
            first, self._writes = self._writes, False
        if first:
            warnings.warn(
                f"lenz keeps no compiled code in {self._root}: {why}. Every process compiles it "
                "again. Set LENZ_CACHE_DIR to another folder, or LENZ_CACHE=0 to hide this.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _evict(self, at: Folder, newest: str) -> None:
        """Delete the oldest entries of a folder until it is within its share, but never `newest`.

        Temporary files left by killed processes are deleted too.
        """
        now = time.time()
        used = 0
        found: list[tuple[float, int, str]] = []
        with os.scandir(at.prefix if at.fd is None else at.fd) as entries:
            for entry in entries:
                with suppress(OSError):  # another process has deleted it or holds it open
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(info.st_mode):  # not ours
                        continue
                    used += info.st_size
                    if entry.name.startswith("."):
                        if now - info.st_mtime > STALE_SECONDS:
                            unlink(at, entry.name)
                    elif entry.name != newest:
                        found.append((info.st_mtime, info.st_size, entry.name))
        for _, size, name in sorted(found):
            if used <= self._limit // SHARDS:
                return
            with suppress(OSError):
                unlink(at, name)
            used -= size


@cache
def store_at(root: str) -> Store:
    """Return this process's only store for `root`, so that each folder warns at most once."""
    return Store(root)


def store_in(options: Options) -> Store | None:
    """The disk cache; None without one."""
    folder = options.cache_dir
    return store_at(folder) if options.cache and folder is not None else None


def _place(kind: str, key: str) -> tuple[str, str, bytes]:
    """Return the folder and file of an entry, and the name that its checksum covers."""
    if not KIND.fullmatch(kind):
        raise InternalError(f"{kind!r} is not a kind of cache entry", rule="store-kind")
    name = f"{kind}\0{key}".encode(errors="surrogatepass")
    digest = hashlib.sha256(name).hexdigest()
    return f"{int(digest[:2], 16) % SHARDS:x}", f"{digest}.{kind}", name


def _pack(data: bytes, name: bytes) -> bytes:
    return HEADER.pack(MAGIC, FORMAT, len(data), _checksum(data, name)) + data


def _unpack(raw: bytes, name: bytes) -> bytes | None:
    """Return the data of an entry, or None if any byte differs from what `_pack` wrote."""
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
