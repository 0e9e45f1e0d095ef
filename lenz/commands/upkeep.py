"""Cache commands: list, verify, clear, and carry to another machine.

A bundle is a zip file of entries, as they are on disk. Entries are machine code, which runs: import
a bundle only from people whose programs you would run. Checksums find damage, not malice.
"""

from __future__ import annotations

import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from lenz.entry import FILE, pack, unpack
from lenz.errors import UserError, untrusted
from lenz.private import reading, replacing
from lenz.runtime.store import LIMIT_BYTES, Store

KINDS = {
    "constant": "constants of graphs",
    "cubin": "kernels for GPUs",
    "graph": "plans of graphs",
    "native": "names of native ops",
    "object": "kernels for CPUs",
    "plan": "code that runs plans",
    "trace": "graphs that need no tracing",
    "tuned": "tiles that max-autotune chose",
}


def table(store: Store) -> str:
    """The number, size and age of the entries of each kind."""
    rows: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for file, size, used in store.files():
        rows[file.partition(".")[2]].append((size, used))
    lines = [f"{'kind':<10}{'entries':>8}{'MiB':>10}  last used"]
    for kind in sorted(rows):
        sizes, times = zip(*rows[kind], strict=True)
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(times)))
        told = f"  {KINDS[kind]}" if kind in KINDS else ""
        lines.append(f"{kind:<10}{len(sizes):>8}{sum(sizes) / 2**20:>10.2f}  {last}{told}")
    every = [size for found in rows.values() for size, _ in found]
    lines.append(f"{'all':<10}{len(every):>8}{sum(every) / 2**20:>10.2f}")
    return "\n".join(lines)


def verify(store: Store) -> tuple[int, list[str]]:
    """Read every entry and delete damaged ones; the number of whole ones, and the deleted names."""
    names = [file for file, *_ in store.files()]
    damaged = [file for file in names if store.read(file) is None]
    for file in damaged:
        store.remove(file)
    return len(names) - len(damaged), damaged


def clear(store: Store) -> int:
    """Delete every entry; returns their number."""
    names = [file for file, *_ in store.files()]
    for file in names:
        store.remove(file)
    return len(names)


def export(store: Store, bundle: Path) -> int:
    """Write all whole entries to a file, replacing it; returns their number."""
    number = 0
    with replacing(bundle) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, *_ in store.files():
            data = store.read(name)
            if data is not None:
                made.writestr(name, pack(data, name))
                number += 1
    return number


def include(store: Store, bundle: Path) -> int:
    """Add the entries of a bundle; returns their number. Raises UserError at a damaged one."""
    number = 0
    for file, data in _entries(bundle):
        if not store.write(file, data):
            raise UserError(f"the cache cannot be written; {number} entries are added")
        number += 1
    return number


def _entries(bundle: Path) -> Iterator[tuple[str, bytes]]:
    """The names and data of a bundle, one by one."""
    not_one = f"{bundle} is damaged or not a lenz bundle"
    with reading(bundle) as file, untrusted(not_one), zipfile.ZipFile(file) as given:
        for entry in given.infolist():
            if not FILE.fullmatch(entry.filename) or entry.file_size > LIMIT_BYTES:
                raise UserError(f"{bundle} is not a lenz bundle: it holds {entry.filename!r}")
            data = unpack(given.read(entry), entry.filename)
            if data is None:
                raise UserError(f"{bundle} is damaged at {entry.filename}")
            yield entry.filename, data
