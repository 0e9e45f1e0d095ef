"""Compiles and links the native code of plans. The store caches objects by their text.

The helpers in native.ll and native_cuda.ll are linked once per process. A text calls them, torch's
library, CPython and kernels by name. It holds no address, so that other processes can use the
object.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache
from importlib.resources import files

from lenz.machines import Library, host
from lenz.runtime.native import addresses
from lenz.runtime.store import Store, cached
from lenz.runtime.threads import in_thread

DEFINED = re.compile(r"^define (\S+) @(\w+)\(([^)]*)\)", re.MULTILINE)
DECLARED = re.compile(r"^declare .* @(\w+)\(.*$", re.MULTILINE)
USED = re.compile(r"[ (]@(\w+)")


class Unavailable(Exception):
    """This torch or system lacks a function that native code calls."""


@cache
def _helpers(gpu: bool) -> str:
    """The text of the helpers."""
    names = ["native.ll", "native_cuda.ll"][: 1 + gpu]
    return "\n".join((files("lenz.plan") / name).read_text("utf-8") for name in names)


@cache
def _heads(gpu: bool) -> Mapping[str, str]:
    """The declaration of each function that a plan may call."""
    text = _helpers(gpu)
    heads = {m[1]: m[0] for m in DECLARED.finditer(text)}
    for result, name, arguments in DEFINED.findall(text):
        kinds = ", ".join(a.split()[0] for a in arguments.split(",") if a.strip())
        heads[name] = f"declare {result} @{name}({kinds})"
    return heads


@cache
def begun(gpu: bool, store: Store | None) -> Future[Library]:
    """The helpers, which a thread links: it may begin before a plan needs them.

    A fork would have no such thread, and LLVM's lock for good. So it waits for the end.
    """
    library = in_thread(_linked, gpu, store)
    getattr(os, "register_at_fork", lambda **_: None)(before=library.exception)  # not on Windows
    return library


def _linked(gpu: bool, store: Store | None) -> Library:
    """The helpers, linked; raises Unavailable."""
    text = _helpers(gpu)
    wanted = {m[1]: m[0] for m in DECLARED.finditer(text) if not m[1].startswith("llvm")}
    found = addresses(tuple(wanted), gpu)
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise Unavailable(f"this torch or system has no {', '.join(missing)}")
    names = [name for _, name, _ in DEFINED.findall(text)]
    library = host().link(_object(text, 2, store), names, found)
    library.addresses.update(found)
    return library


def linked(text: str, own: Mapping[str, int], gpu: bool, store: Store | None) -> Library:
    """The function `call` of a plan; `own` holds the addresses of kernels and torch's shims.

    The result must stay alive while the code is used. Raises Unavailable.
    """
    helpers, heads = begun(gpu, store).result(), callees(text, gpu)
    imports = {**{n: helpers.addresses[n] for n in heads}, **own}
    whole = "\n".join([*heads.values(), text])
    return host().link(_object(whole, 0, store), ["call"], imports)


def callees(text: str, gpu: bool) -> dict[str, str]:
    """The helpers and library functions that a plan calls, with their declarations."""
    heads = _heads(gpu)
    return {n: heads[n] for n in dict.fromkeys(USED.findall(text)) if n in heads}


def _object(text: str, level: int, store: Store | None) -> bytes:
    """The object of a text, from the store or compiled and stored."""
    target = host().target()
    parts = (target.triple, target.cpu, target.features, target.version, str(level), text)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cached(store, "plan", key, lambda: host().compile(text, None, level))
