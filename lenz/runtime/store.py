"""The disk cache: bytes under the hash of a key. Only this file writes the cache.

Invariants at every moment, whatever crashes or runs at the same time:

- An entry is complete or absent. It is written to a temporary file, synced, then renamed.
- A file that is damaged, truncated, of another version or of another user is a miss, not an error.
- Only this user can read or write an entry. Nothing is read from a folder that others can write to,
  because entries are code. This is checked each time, from the root down, by descriptors.
- Nothing blocks: a pipe, a device or a folder in place of an entry is a miss.
- After a failed write (full disk, read-only folder) this process stops writing, with one warning.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import cache

from lenz.entry import FILE, FORMAT, HEADER, SHARDS, file_of, pack, shard_of, unpack
from lenz.options import Options
from lenz.private import Folder, folder, is_private, naming, opened, unlink, write
from lenz.remote import Remote, remote_at

# Each of the folders has its own limit. A compiled graph takes 10 to 200 KiB.
LIMIT_BYTES = 1 << 30
STALE_SECONDS = 3600
DAY_SECONDS = 86400


class Store:
    """A cache of bytes in the folder `root`, safe to share between threads and processes.

    `limit` bounds its size in bytes. When one of the 16 folders exceeds its sixteenth, its least
    recently used entries are deleted first. Entries that are not on the disk are requested from
    `remote`.
    """

    def __init__(
        self, root: str | os.PathLike[str], limit: int = LIMIT_BYTES, remote: Remote | None = None
    ) -> None:
        self._root = os.path.realpath(root)  # the root may be a link, folders below it may not
        self._limit, self._remote = limit, remote
        self._lock = threading.Lock()
        self._writes = True

    def get(self, kind: str, key: str) -> bytes | None:
        """Return the data last put under `kind` and `key`, or None without a complete entry."""
        file = file_of(kind, key)
        data = self.read(file)
        raw = self._remote.get(file) if data is None and self._remote is not None else None
        if raw is not None and (data := unpack(raw, file)) is not None:
            self.write(file, data)
        return data

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Store `data` under `kind` and `key`, replacing any earlier entry.

        A failure to write is not an error: it warns once, and later calls do nothing.
        """
        file = file_of(kind, key)
        self.write(file, data)
        if self._remote is not None:
            self._remote.put(file, pack(data, file))

    def read(self, file: str) -> bytes | None:
        """Return the data in a file of the cache, or None without a complete entry."""
        try:
            with self._folder(file) as at, opened(at, file, os.O_RDONLY) as entry:
                info = os.fstat(entry)
                # A file larger than the whole cache is not an entry, and would fill the memory.
                is_entry = stat.S_ISREG(info.st_mode) and is_private(info)
                if not is_entry or info.st_size > LIMIT_BYTES:
                    return None
                data = unpack(_read(entry, info.st_size), file)
                if data is not None and abs(time.time() - info.st_mtime) > DAY_SECONDS:
                    with suppress(OSError):  # a read-only folder: the age stays as it is
                        os.utime(at.prefix + file, dir_fd=at.fd)
                return data
        except OSError:
            return None

    def write(self, file: str, data: bytes) -> bool:
        """Store `data` in a file of the cache, as `put` does; False if nothing is written."""
        if not self._writes or HEADER.size + len(data) > LIMIT_BYTES:
            return False
        try:
            with self._folder(file, make=True) as at:
                with suppress(IsADirectoryError):  # a folder in place of the entry: it stays a miss
                    write(at, file, pack(data, file), sync=True)
                self._evict(at, file)
            return True
        except OSError as error:
            self._stop(error.strerror or type(error).__name__)
            return False

    def files(self) -> list[tuple[str, int, float]]:
        """The name of each file of the cache, with its size in bytes and the time of its use.

        Raises UserError if a folder cannot be read.
        """
        found, told = [], f"cannot read the cache in {self._root}"
        for shard in map("{0:x}{0:x}".format, range(SHARDS)):
            with naming(told), suppress(FileNotFoundError), self._folder(shard) as at:
                named = [(name, info) for name, info in _listed(at) if FILE.fullmatch(name)]
                found += [(name, info.st_size, info.st_mtime) for name, info in named]
        return sorted(found)

    def remove(self, file: str) -> None:
        """Delete a file of the cache, if it is there. Raises UserError if it stays."""
        told = f"cannot delete from the cache in {self._root}"
        with naming(told), suppress(FileNotFoundError), self._folder(file) as at:
            unlink(at, file)

    def _folder(self, file: str, make: bool = False) -> AbstractContextManager[Folder]:
        return folder(self._root, f"v{FORMAT}", shard_of(file), make=make)

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

        Temporary files of killed processes are deleted too. If the clock jumped back, times in the
        future mean nothing, and count as the oldest.
        """
        now, used = time.time(), 0
        found: list[tuple[float, int, str]] = []
        for name, info in _listed(at):
            used += info.st_size
            if name.startswith("."):
                if abs(now - info.st_mtime) > STALE_SECONDS:
                    _drop(at, name)
            elif name != newest:
                used_at = info.st_mtime if info.st_mtime <= now + DAY_SECONDS else 0.0
                found.append((used_at, info.st_size, name))
        for _, size, name in sorted(found):
            if used <= self._limit // SHARDS:
                return
            _drop(at, name)
            used -= size


def _listed(at: Folder) -> Iterator[tuple[str, os.stat_result]]:
    """The name and the state of each file of a folder; folders in it are not ours."""
    with os.scandir(at.prefix if at.fd is None else at.fd) as entries:
        for entry in entries:
            with suppress(OSError):  # another process has deleted it
                info = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(info.st_mode):
                    yield entry.name, info


def _drop(at: Folder, name: str) -> None:
    """Delete a file of a folder, if it is there and no other process holds it open."""
    with suppress(OSError):
        unlink(at, name)


@cache
def store_at(
    root: str, limit: int = LIMIT_BYTES, url: str | None = None, secret: str | None = None
) -> Store:
    """Return this process's only store for `root`, so that each folder warns at most once."""
    return Store(root, limit=limit, remote=None if url is None else remote_at(url, secret))


def cached(store: Store | None, kind: str, key: str, make: Callable[[], bytes]) -> bytes:
    """The data of an entry, from the store or made and stored."""
    data = None if store is None else store.get(kind, key)
    if data is None:
        data = make()
        if store is not None:
            store.put(kind, key, data)
    return data


def store_in(options: Options) -> Store | None:
    """The disk cache; None without one."""
    folder, limit = options.cache_dir, options.cache_mb << 20
    if not options.cache or folder is None:
        return None
    return store_at(folder, limit, options.remote_cache, options.remote_secret)


def _read(file: int, size: int) -> bytes:
    """Read `size` bytes, or fewer if the file ends before."""
    parts = []
    while size > 0 and (part := os.read(file, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
