"""The option `perf_map`: CPU kernels under their own names in Linux `perf`.

`perf` looks for the functions of generated code in /tmp/perf-PID.map, one a line: its address and
its size in hex, and its name. Sizes are those of the object's ELF symbols.
"""

from __future__ import annotations

import ctypes
import os
import stat
import warnings
from collections.abc import Iterator
from struct import Struct

from lenz.ir.binary import sections
from lenz.machines import Code
from lenz.private import Folder, is_private, opened

SYMBOL = Struct("<IBxHQQ")  # of ELF64
SYMBOLS, FUNCTION = 2, 2  # types of a section and of a symbol


def functions_of(obj: bytes) -> Iterator[tuple[str, int, int, int]]:
    """The name, section, offset and size of each function of an ELF object."""
    found = sections(obj)
    for kind, offset, length, names in found:
        for at in range(offset, offset + length, SYMBOL.size) if kind == SYMBOLS else ():
            name, info, section, value, extent = SYMBOL.unpack_from(obj, at)
            begin = found[names][1] + name
            if info & 15 == FUNCTION and section:
                yield obj[begin : obj.index(0, begin)].decode(), section, value, extent


def map_kernels(code: Code) -> None:
    """Add the kernels of a graph, and their parallel parts, to the map of this process.

    Warns if the file is not this user's alone: others can make files in /tmp, too.
    """
    text = ""
    for obj in (data for file, data in code.files.items() if file.endswith(".o")):
        found = [*functions_of(obj)]
        known = [(x, f) for x in found if (f := code.functions.get(x[0])) is not None]
        for (_, mine, offset, _), f in {x[1]: (x, f) for x, f in known}.values():
            base = (ctypes.cast(f, ctypes.c_void_p).value or 0) - offset  # type: ignore[arg-type]  # a function of ctypes
            lines = [(base + x[2], x[3], x[0]) for x in found if x[1] == mine]
            text += "".join(f"{at:x} {extent:x} {name}\n" for at, extent, name in lines)
    name, flags = f"perf-{os.getpid()}.map", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        with opened(Folder("/tmp/", None), name, flags) as file:
            info = os.fstat(file)
            if not (stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and is_private(info)):
                raise PermissionError("it is not a file of this user alone")
            os.write(file, text.encode())
    except OSError as e:
        warnings.warn(f"lenz: /tmp/{name} is not written: {e}", stacklevel=2)
