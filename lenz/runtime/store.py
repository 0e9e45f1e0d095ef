"""The disk cache: bytes under the hash of a key.  The only place that writes the cache.

What holds at every moment, whatever dies or runs beside us:

- An entry is whole or absent.  It is written to a temporary file, synced, then renamed.
- A file that is damaged, cut short, of another version or of another user is a miss, no error.
- Only this user can read or write an entry, and nothing is read from a folder that others can
  write to: entries are code. That is asked each time, from the root down, by descriptors.
- Nothing waits: a pipe, a device or a folder in place of an entry is a miss.
- A write that fails (full disk, read-only folder) ends writing for this process, with one warning.

An entry is a header (magic, format version, length), the SHA-256 of name and data, the data.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import struct
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import NamedTuple

from lenz.errors import InternalError

MAGIC = b"lenz\x89\r\n\x1a"
FORMAT = 2
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

    __slots__ = ("_limit", "_lock", "_root", "_writes")

    def __init__(self, root: str | os.PathLike[str], *, limit: int = LIMIT_BYTES) -> None:
        self._root = os.path.realpath(root)  # the root may be a link, what is below it may not
        self._limit = limit
        self._lock = threading.Lock()
        self._writes = True

    def get(self, kind: str, key: str) -> bytes | None:
        """Return the data last put under `kind` and `key`, or None if there is no whole entry."""
        shard, file, name = _place(kind, key)
        try:
            with self._folder(shard) as folder, _opened(folder, file, os.O_RDONLY) as entry:
                info = os.fstat(entry)
                # What is larger than the whole cache is no entry, and would fill the memory.
                is_entry = stat.S_ISREG(info.st_mode) and _is_private(info)
                if not is_entry or info.st_size > LIMIT_BYTES:
                    return None
                data = _unpack(_read(entry, info.st_size), name)
                if data is not None and time.time() - info.st_mtime > DAY_SECONDS:
                    with suppress(OSError):  # a folder we may only read: the age stays as it is
                        os.utime(folder.prefix + file, dir_fd=folder.fd)
                return data
        except OSError:
            return None

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Keep `data` under `kind` and `key`, in place of what was there.

        A failure to write is no error: it warns once, and later calls do nothing.
        """
        shard, file, name = _place(kind, key)
        if not self._writes or HEADER.size + len(data) > LIMIT_BYTES:
            return
        try:
            with self._folder(shard, make=True) as folder:
                with suppress(IsADirectoryError):  # one in place of the entry: it stays a miss
                    _write(folder, file, _pack(data, name))
                self._evict(folder, file)
        except OSError as error:
            self._stop(error.strerror or type(error).__name__)

    @contextmanager
    def _folder(self, shard: str, make: bool = False) -> Iterator[_Folder]:
        """Open a folder of entries; with `make`, make what is missing, for this user alone.

        Raises OSError unless the folder and those above it, up to the root, belong to this user
        and nobody else can write to them. Each is opened from the one before, so that none can be
        exchanged after it was looked at.
        """
        if make:
            _make_folders(self._root)
        with ExitStack() as opened:
            folder = _Folder("", None)
            for name in (self._root, f"v{FORMAT}", shard):
                path = folder.prefix + name
                if make:
                    with suppress(FileExistsError):  # another process was faster
                        os.mkdir(path, 0o700, dir_fd=folder.fd)
                if not _DIRECTORY:  # Windows opens no folders; what is in them has access lists
                    folder = _Folder(path + os.sep, None)
                    continue
                fd = opened.enter_context(_opened(folder, name, os.O_RDONLY | _DIRECTORY))
                if not _is_private(os.fstat(fd)):
                    raise PermissionError(errno.EACCES, "others can write to it, or own it")
                folder = _Folder("", fd)
            yield folder

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

    def _evict(self, folder: _Folder, newest: str) -> None:
        """Delete the oldest entries of one folder until it is within its share, never `newest`.

        Temporary files that a killed process left behind go as well.
        """
        now = time.time()
        used = 0
        found: list[tuple[float, int, str]] = []
        with os.scandir(folder.prefix if folder.fd is None else folder.fd) as entries:
            for entry in entries:
                with suppress(OSError):  # another process deletes as well, or holds it open
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(info.st_mode):  # none of ours
                        continue
                    used += info.st_size
                    if entry.name.startswith("."):
                        if now - info.st_mtime > STALE_SECONDS:
                            _unlink(folder, entry.name)
                    elif entry.name != newest:
                        found.append((info.st_mtime, info.st_size, entry.name))
        for _, size, name in sorted(found):
            if used <= self._limit // SHARDS:
                return
            with suppress(OSError):
                _unlink(folder, name)
            used -= size


@cache
def store_at(root: str) -> Store:
    """Return the one store of this process for `root`, so that each folder warns at most once."""
    return Store(root)


class _Folder(NamedTuple):
    """An open folder: its descriptor, or (on Windows) None and a prefix of names."""

    prefix: str
    fd: int | None


_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# A pipe would wait for its other end, and a terminal would become that of this process.
_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)


@contextmanager
def _opened(folder: _Folder, name: str, flags: int) -> Iterator[int]:
    """Open a file of a folder, no link; a new one is for this user alone."""
    file = os.open(folder.prefix + name, flags | _FLAGS, 0o600, dir_fd=folder.fd)
    try:
        yield file
    finally:
        os.close(file)


def _unlink(folder: _Folder, name: str) -> None:
    os.unlink(folder.prefix + name, dir_fd=folder.fd)


def _make_folders(path: str) -> None:
    """Make what is missing above `path`, for this user alone."""
    above = os.path.dirname(path)
    if above != path and not os.path.isdir(above):
        _make_folders(above)
        with suppress(FileExistsError):
            os.mkdir(above, 0o700)


def _place(kind: str, key: str) -> tuple[str, str, bytes]:
    """Return the folder and file of an entry, and the name that its checksum covers."""
    if not KIND.fullmatch(kind):
        raise InternalError(f"{kind!r} is no kind of cache entry", rule="store-kind")
    name = f"{kind}\0{key}".encode(errors="surrogatepass")
    digest = hashlib.sha256(name).hexdigest()
    return f"{int(digest[:2], 16) % SHARDS:x}", f"{digest}.{kind}", name


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


def _write(folder: _Folder, name: str, raw: bytes) -> None:
    """Put `raw` at `name` in one step: readers see the old file or the new one, never a part."""
    temporary = f".{name[:16]}-{os.getpid()}-{os.urandom(6).hex()}"
    try:
        with _opened(folder, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            left = memoryview(raw)
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        old, new = folder.prefix + temporary, folder.prefix + name
        os.replace(old, new, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    except BaseException:
        with suppress(OSError):
            _unlink(folder, temporary)
        raise
