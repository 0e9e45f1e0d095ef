"""The cache key of a compiled graph. It holds every input, so that equal keys give equal code.

The inputs are the text of the program, the options, the target and the GPUs, the versions of torch
and Triton, and every source file of lenz.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TypeAlias

import torch

from lenz.context import Context
from lenz.frontend import FxProgram
from lenz.frontend.identity import identity
from lenz.ir.op import STRUCTURAL, all_ops
from lenz.machines import is_known, loader_of
from lenz.options import Options
from lenz.runtime.store import Store

State: TypeAlias = tuple[int, ...]


class Sources:
    """The Python files below a folder; this process began to import them at time `since`.

    Most files are imported late. If a file changes meanwhile, the process may run a mix of two
    versions, and its code must not reach other processes. So there is no digest after a change. All
    fields of `State` are compared: a copy may have the size and time of the original. Times in
    the future are ignored: the clock was set back.
    """

    def __init__(self, root: str, since: float) -> None:
        self._root, self._files = root, _files(root)
        now = time.time() * 1e9
        times = (t for *_, mtime, ctime in self._files.values() for t in (mtime, ctime))
        has_changed = any(since * 1e9 < t <= now for t in times)
        self._digest = "" if has_changed else _digest(root, self._files)

    def digest(self, again: bool = False) -> str:
        """The hash of the files, empty if one has changed. `again` checks for changes (1 ms)."""
        if again and self._digest and (files := _files(self._root)) != self._files:
            # The text may be unchanged: a new link or mode changes a file's numbers too.
            same = _digest(self._root, files) == self._digest
            self._files, self._digest = files, self._digest if same else ""
        return self._digest


def _files(root: str) -> dict[str, State]:
    """Every Python file with its device, inode, size, mtime and ctime."""
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(n for n in names if n.endswith(".py")):
            path = os.path.join(folder, name)
            found[path] = _state(os.stat(path))
    return found


def _state(i: os.stat_result) -> State:
    return i.st_dev, i.st_ino, i.st_size, i.st_mtime_ns, i.st_ctime_ns


def _digest(root: str, files: Mapping[str, State]) -> str:
    """The hash of names and texts; empty if a file changes during the read."""
    digest = hashlib.sha256()
    for path, state in files.items():
        with open(path, "rb") as file:
            data = file.read()
            if _state(os.fstat(file.fileno())) != state:
                return ""
        digest.update(f"{path.removeprefix(root)[1:]} {len(data)}\n".encode() + data)
    return digest.hexdigest()


# Read now, before the late imports.
OWN = Sources(os.path.dirname(os.path.abspath(__file__)), sys.modules["lenz"].STARTED)


def sources(again: bool = False) -> str:
    """The hash of lenz's own files; empty, with one warning, if this process may mix versions."""
    digest = OWN.digest(again)
    if not digest:
        _say_changed()
    return digest


@cache
def _say_changed() -> None:
    warnings.warn(
        "lenz's files have changed since this process began to import them. Code compiled from"
        " now on is not cached; restart the process to use the cache.",
        RuntimeWarning,
        stacklevel=2,
    )


def is_extended() -> bool:
    """True if the user has registered ops or lowerings in this process: no key covers them."""
    registry = sys.modules.get("lenz.lower.registry")
    if registry is not None:
        return not registry.is_unextended()
    ops = sys.modules.get("lenz.ops")
    return len(all_ops()) != (STRUCTURAL if ops is None else ops.OWN)


def native_names(store: Store | None) -> frozenset[str]:
    """The ops that have a lowering. They come from the store while `lenz.lower` is not imported."""
    is_known = "lenz.lower" not in sys.modules and not is_extended() and sources()
    store = store if is_known else None
    data = None if store is None else store.get("native", sources())
    if data is not None:
        return frozenset(data.decode().split())
    from lenz.lower import native_ops

    names = native_ops()
    if store is not None and (digest := sources(again=True)):
        store.put("native", digest, " ".join(sorted(names)).encode())
    return names


def key_of(program: FxProgram, cx: Context) -> str | None:
    """The cache key of a program; None if it has none or must be compiled anyway."""
    if not has_key(cx.options) or (text := identity(program)) is None:
        return None
    values = (n.meta.get("val") for n in program.gm.graph.nodes)
    return key_with(text, cx, {v.device for v in values if isinstance(v, torch.Tensor)})


def has_key(options: Options) -> bool:
    """Whether code compiled with these options, in this process, may be cached."""
    own = options.launch_groups  # the key would not know their code
    is_usual = options.cache and not options.verify and options.fuel < 0 and not own
    return is_usual and not is_extended() and bool(sources())


def key_with(text: str, cx: Context, devices: Iterable[torch.device]) -> str:
    """The key of a text compiled for these devices."""
    known = sorted(str(d) for d in devices if is_known(d.type))
    head = [
        sources(),
        f"torch {torch.__version__} {torch.version.git_version}",
        f"{torch.get_default_dtype()} {cx.options.key()} {cx.target.key()}",
        *(f"{d} {loader_of(d).key(d)}" for d in known),
    ]
    return hashlib.sha256("\n".join([*head, text]).encode()).hexdigest()
