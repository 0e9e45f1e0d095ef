"""The bytes of a cache entry: a header, the SHA-256 of name and data, the data.

The file's name is the SHA-256 of the entry's name, so that a file can be checked by itself.
"""

from __future__ import annotations

import hashlib
import re
import struct

from lenz.errors import InternalError

MAGIC = b"lenz\x89\r\n\x1a"
FORMAT = 2
HEADER = struct.Struct("<8sIQ32s")
KIND = re.compile(r"[a-z][a-z0-9_]*")
FILE = re.compile(r"([0-9a-f]{64})\.([a-z][a-z0-9_]*)")

# Entries are spread over 16 folders, so that a write scans only a sixteenth of the cache.
SHARDS = 16


def file_of(kind: str, key: str) -> str:
    """The name of an entry's file. A key is any text; a kind is a plain word."""
    if not KIND.fullmatch(kind):
        raise InternalError(f"{kind!r} is not a kind of cache entry", rule="store-kind")
    name = f"{kind}\0{key}".encode(errors="surrogatepass")
    return f"{hashlib.sha256(name).hexdigest()}.{kind}"


def shard_of(file: str) -> str:
    """The folder of an entry's file."""
    return f"{int(file[:2], 16) % SHARDS:x}"


def pack(data: bytes, file: str) -> bytes:
    """The bytes of the file that holds `data`."""
    return HEADER.pack(MAGIC, FORMAT, len(data), _checksum(data, file)) + data


def unpack(raw: bytes, file: str) -> bytes | None:
    """The data of an entry, or None if any byte differs from what `pack` wrote."""
    if len(raw) < HEADER.size:
        return None
    magic, version, length, checksum = HEADER.unpack_from(raw)
    data = raw[HEADER.size :]
    if magic != MAGIC or version != FORMAT or length != len(data):
        return None
    return data if checksum == _checksum(data, file) else None


def _checksum(data: bytes, file: str) -> bytes:
    digest = hashlib.sha256(bytes.fromhex(file[:64]))
    digest.update(data)
    return digest.digest()
