"""Files that only this user can write, in folders that only this user can write.

Each folder is opened from its parent, without following links, and checked after opening, so that
none can be swapped in between. A file is created or replaced, never written through an existing
name. `reading`, `replacing` and `naming` are for files that the user names, anywhere.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import BinaryIO, NamedTuple

from lenz.errors import UserError


class Folder(NamedTuple):
    """An open folder: its descriptor, or (on Windows) None and a prefix of names."""

    prefix: str
    fd: int | None


_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# Opening a pipe would wait for its other end; a terminal would become the controlling one.
_AT_ONCE = sum(getattr(os, flag, 0) for flag in ("O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
_FLAGS = _AT_ONCE | getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def folder(*names: str, make: bool = False) -> Iterator[Folder]:
    """Open a folder: the first name is a path, each further one a folder inside the last.

    With `make`, missing folders are created for this user alone. Raises OSError unless this user
    owns all of them and nobody else can write to them. Folders above the first may belong to
    anyone.
    """
    if make:
        make_above(names[0])
    with ExitStack() as stack:
        made = Folder("", None)
        for name in names:
            path = made.prefix + name
            if make:
                with suppress(FileExistsError):  # another process was faster
                    os.mkdir(path, 0o700, dir_fd=made.fd)
            if not _DIRECTORY:  # Windows cannot open folders; files in them have access lists
                made = Folder(path + os.sep, None)
                continue
            fd = stack.enter_context(opened(made, name, os.O_RDONLY | _DIRECTORY))
            if not is_private(os.fstat(fd)):
                raise PermissionError(errno.EACCES, "others own it or can write to it", name)
            made = Folder("", fd)
        yield made


def make_above(path: str) -> None:
    """Create missing folders above `path`, for this user alone."""
    missing = []
    while (above := os.path.dirname(path)) not in ("", path) and not os.path.isdir(above):
        missing.append(above)
        path = above
    for each in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(each, 0o700)


@contextmanager
def opened(where: Folder, name: str, flags: int, mode: int = 0o600) -> Iterator[int]:
    """Open a file in a folder, not following links; a new file is for this user alone.

    The caller's `mode` may give it to others, as far as the process's umask does.
    """
    file = os.open(where.prefix + name, flags | _FLAGS, mode, dir_fd=where.fd)
    try:
        yield file
    finally:
        os.close(file)


def unlink(where: Folder, name: str) -> None:
    """Delete a file of a folder."""
    os.unlink(where.prefix + name, dir_fd=where.fd)


@contextmanager
def new_file(where: Folder, name: str, sync: bool = False, mode: int = 0o600) -> Iterator[int]:
    """Open a new file that becomes `name` in the end: readers see the old file or the new one.

    With `sync` that holds even if the machine crashes. `mode` is as in `opened`.
    """
    temporary = f".{name[:16]}-{os.getpid()}-{os.urandom(6).hex()}"
    try:
        with opened(where, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
            yield file
            if sync:
                os.fsync(file)
        old, new = where.prefix + temporary, where.prefix + name
        os.replace(old, new, src_dir_fd=where.fd, dst_dir_fd=where.fd)
    except BaseException:
        with suppress(OSError):
            unlink(where, temporary)
        raise


def write(where: Folder, name: str, data: bytes, sync: bool = False) -> None:
    """Write `data` to `name` atomically, as in `new_file`."""
    with new_file(where, name, sync) as file:
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]


@contextmanager
def naming(what: str, hint: str = "") -> Iterator[None]:
    """Raise a UserError that begins with `what` if the system refuses something.

    The body uses files that the user names, or text in them that is not UTF-8.
    """
    try:
        yield
    except (OSError, UnicodeError) as e:
        raise UserError(f"{what}: {getattr(e, 'strerror', None) or e}", hint=hint) from e


@contextmanager
def reading(path: str | os.PathLike[str], hint: str = "") -> Iterator[BinaryIO]:
    """Open a regular file that the user names. Raises UserError, also instead of waiting."""
    at_once = lambda name, flags: os.open(name, flags | _AT_ONCE)
    told = f"cannot read {os.fspath(path)!r}"
    with naming(told, hint), open(path, "rb", opener=at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{told}: it is not a regular file", hint=hint)
        yield file


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new file that replaces the user's file `path` in the end.

    Raises UserError if it cannot be written, or is a folder, a pipe or a device.
    """
    where, name = os.path.split(path)
    with naming(told := f"cannot write {os.fspath(path)!r}"):
        if os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"{told}: it is not a regular file")
        at = Folder(os.path.join(where, ""), None)
        with new_file(at, name, True, 0o666) as fd, os.fdopen(fd, "wb", closefd=False) as file:
            yield file


def is_private(info: os.stat_result) -> bool:
    """True if this user owns the file and nobody else can write it."""
    if not hasattr(os, "geteuid"):  # Windows: the user's own folder has its own access list
        return True
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
