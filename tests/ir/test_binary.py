"""A compiled kernel as data: it reads back, and nothing damaged does."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from lenz.errors import InternalError
from lenz.ir.binary import Binary, decode, encode

SAMPLE = Binary("softmax_0", bytes(range(256)) + b"\n\0{}", 8, 4096, 2, 40, 0)


@pytest.mark.parametrize("code", [b"\n", b"\0", b"\x7fELF", b'{"code": 1}\n' * 1000])
def test_reads_back(code: bytes) -> None:
    for b in (replace(SAMPLE, code=code), replace(SAMPLE, registers=-1, spills=-1)):
        assert decode(encode(b)) == b


def test_equal_binaries_give_equal_bytes() -> None:
    assert encode(SAMPLE) == encode(replace(SAMPLE))
    assert encode(SAMPLE) != encode(replace(SAMPLE, warps=4))


def test_every_flipped_byte_and_every_cut_is_an_error() -> None:
    data = encode(SAMPLE)
    for n in range(len(data)):
        flipped = data[:n] + bytes([data[n] ^ 0x10]) + data[n + 1 :]
        for damaged in (flipped, data[:n], data + data[: n + 1]):
            with pytest.raises(ValueError, match="damaged"):
                decode(damaged)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]\n",
        b"nothing\nx",
        b'{"name": "k", "code": 1}\nx',
        b'{"name":"k","code":2,"warps":4,"shared":0,"extra":2,"registers":9,"spills":0}\nx',
        b'{"name":"k","code":1,"warps":0,"shared":0,"extra":2,"registers":9,"spills":0}\nx',
        b'{"name":"k","code":1,"warps":4,"shared":0,"extra":2,"registers":9,"new":0}\nx',
    ],
)
def test_another_form_is_an_error(body: bytes) -> None:
    with pytest.raises(ValueError, match="another version"):
        decode(hashlib.sha256(body).digest() + body)


@pytest.mark.parametrize(
    "wrong",
    [{"warps": 0}, {"warps": 33}, {"name": ""}, {"code": b""}, {"shared": -1}, {"registers": -2}],
)
def test_a_binary_that_exists_can_be_launched(wrong: dict[str, object]) -> None:
    with pytest.raises(InternalError):
        replace(SAMPLE, **wrong)  # type: ignore[arg-type]
    assert SAMPLE.threads == 256
