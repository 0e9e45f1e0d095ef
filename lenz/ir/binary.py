"""Machine code: one GPU kernel with facts for launches and reports; the sections of a file."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict

from lenz.errors import InternalError
from lenz.records import dataclass

DIGEST = hashlib.sha256().digest_size
MAX_WARPS = 32  # a block has at most 1024 threads on every GPU
# ELF64: the place of the section table in the file header, and the size and number of its entries.
TABLE, ENTRIES, SECTION = map(struct.Struct, ("<40xQ", "<58xHH", "<4xI16xQQI"))


@dataclass(frozen=True, slots=True)
class Binary:
    """A cubin that holds the one kernel `name`.

    A launch has 32 * `warps` threads per block, `shared` bytes of dynamic shared memory, and after
    the kernel's own parameters `extra` hidden ones: pointers to scratch memory, null since our
    kernels have none. `registers` counts 32-bit registers per thread. `spills` is the stack of a
    thread in bytes: values that do not fit in registers. Both are -1 if unknown.
    """

    name: str
    code: bytes
    warps: int
    shared: int
    extra: int
    registers: int
    spills: int

    def __post_init__(self) -> None:
        if not (self.name and self.code and 1 <= self.warps <= MAX_WARPS):
            raise InternalError(f"kernel {self.name!r}: {len(self.code)} bytes, {self.warps} warps")
        if min(self.shared, self.extra, self.registers + 1, self.spills + 1) < 0:
            raise InternalError(f"kernel {self.name!r}: a count is negative", line=str(self)[:200])

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps


def sections(code: bytes) -> list[tuple[int, int, int, int]]:
    """Type, offset, size and link of each section of an ELF64 file."""
    (start,), (size, count) = TABLE.unpack_from(code), ENTRIES.unpack_from(code)
    return [SECTION.unpack_from(code, start + k * size) for k in range(count)]


def encode(b: Binary) -> bytes:
    """Return bytes that `decode` reads back: SHA-256, a line of JSON, code."""
    header = json.dumps({**asdict(b), "code": len(b.code)}, sort_keys=True)
    body = header.encode() + b"\n" + b.code
    return hashlib.sha256(body).digest() + body


def decode(data: bytes) -> Binary:
    """Read the bytes of `encode`; raises ValueError if any byte is wrong, missing or extra."""
    body = data[DIGEST:]
    if hashlib.sha256(body).digest() != data[:DIGEST]:
        raise ValueError("this binary is damaged, or is not one")
    header, _, code = body.partition(b"\n")
    try:
        fields = json.loads(header)
        if fields["code"] != len(code):
            raise ValueError(f"{len(code)} bytes of code")
        return Binary(**{**fields, "code": code})
    except (InternalError, KeyError, TypeError, ValueError) as e:
        raise ValueError(f"this binary was written by another version: {e}") from e
