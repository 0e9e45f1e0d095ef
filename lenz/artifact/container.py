"""The file of an artifact: a manifest and tensors, in the layout of safetensors.

An artifact is one file of data. Its tensors are the weights, constants and machine code. The text
of its header holds the manifest, as JSON. The manifest has the SHA-256 of every tensor, so that a
damaged file is rejected before anything of it runs. The machine code does run: load an artifact
only from a source whose programs you would run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lenz.errors import UserError, untrusted
from lenz.private import naming, reading, replacing
from lenz.records import dataclass

FORMAT = 2
ROW = 1 << 12  # words of 8 bytes
WHOLE = "artifact.lenz"  # the file in a folder
Manifest: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of an artifact. CPU tensors are pages of the file, shared by processes."""

    manifest: Manifest
    tensors: Mapping[str, Tensor]


def of_bytes(data: bytes) -> Tensor:
    """Bytes as a tensor."""
    flat = torch.empty(len(data), dtype=torch.uint8)
    if data:
        flat.numpy()[:] = memoryview(data)
    return flat


def to_bytes(t: Tensor) -> bytes:
    """The bytes of such a tensor."""
    return t.numpy().tobytes()


def digest(name: str, t: Tensor) -> str:
    """The SHA-256 of a tensor's dtype, sizes and elements, which must be contiguous.

    For a weight, it hashes the sums of each `ROW` words. They change with any word, and are
    computed at the speed of memory: 17 GB/s, against 1.6 of SHA-256.
    """
    found = hashlib.sha256(f"{t.dtype} {list(t.shape)}\n".encode())
    data = t.detach().reshape(-1).view(torch.uint8) if t.numel() else torch.empty(0).byte()
    end = data.numel() // (8 * ROW) * 8 * ROW if name.startswith("weight.") else 0
    if end:
        words = data[:end] if data.data_ptr() % 8 == 0 else data[:end].clone()
        found.update(words.view(torch.int64).view(-1, ROW).sum(1).numpy().data)
    found.update(data[end:].numpy().data)
    return found.hexdigest()


def as_bytes(contents: Contents) -> bytes:
    """The bytes of the file. Raises UserError for a type that safetensors lacks."""
    from safetensors.torch import save

    tensors = {name: t.detach().contiguous() for name, t in contents.tensors.items()}
    sums = {name: digest(name, t) for name, t in tensors.items()}
    text = json.dumps({"format": FORMAT, **contents.manifest, "sums": sums}, sort_keys=True)
    try:
        return save(tensors, {"lenz": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    except KeyError as e:  # the type that its table lacks
        raise UserError(f"an artifact cannot hold a tensor of {e}") from e


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise UserError if the folder for a file is missing."""
    folder = Path(path).absolute().parent
    if not os.path.isdir(folder):  # no error for a long name
        raise UserError(f"there is no folder {str(folder)!r}", hint="make it first")


def write(path: str | os.PathLike[str], contents: Contents) -> None:
    """Write the file atomically. Raises UserError if that is impossible."""
    check_folder(path)
    data = as_bytes(contents)
    with replacing(path) as file:
        file.write(data)


def write_folder(path: str | os.PathLike[str], contents: Contents) -> None:
    """Write a folder for people: the file, with its texts and machine code beside it."""
    folder = Path(path)
    manifest = {k: v for k, v in contents.manifest.items() if k != "variants"}
    texts = {"manifest.json": (json.dumps(manifest, indent=1) + "\n").encode()}
    for k, v in enumerate(contents.manifest["variants"]):
        texts[f"plan{k}.ir"] = v["plan"].encode()
        made = [(d, need, p) for d, known in v["code"].items() for need, p in known.items()]
        for device, need, pieces in made:
            for piece, name in pieces.items():
                where = [device, str(k)] if need == device else [device, need, str(k)]
                file = ".".join(map(quoted, [*where, piece, "code"]))
                texts[file] = to_bytes(contents.tensors[name])
    with naming(f"cannot write {os.fspath(path)!r}"):
        folder.mkdir(parents=True, exist_ok=True)
    for file, data in texts.items():
        with replacing(folder / file) as made_file:
            made_file.write(data)
    write(folder / WHOLE, contents)


def quoted(name: str) -> str:
    """A name quoted for use in a file name."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def read(source: str | os.PathLike[str] | bytes) -> Contents:
    """Read an artifact. Raises UserError for other files, damaged ones, and other formats."""
    if not isinstance(source, bytes) and os.path.isdir(source):
        source = Path(source) / WHOLE
    with untrusted("this is not a lenz artifact, or a damaged one"):
        head, tensors = _from_bytes(source) if isinstance(source, bytes) else _from_file(source)
        text = head["lenz"]
        if hashlib.sha256(text.encode()).hexdigest() != head["sha256"]:
            raise UserError("this artifact is damaged: the manifest has changed")
        manifest = json.loads(text)
        if (found := manifest["format"]) != FORMAT:
            raise UserError(f"this artifact has format {found}; this lenz reads {FORMAT}")
        if manifest["sums"].keys() != tensors.keys():
            raise UserError("this artifact is damaged: tensors are missing")
        for name, t in tensors.items():
            if digest(name, t) != manifest["sums"][name]:
                raise UserError(f"this artifact is damaged: {name!r} has changed")
    return Contents(manifest, tensors)


def _from_file(path: str | os.PathLike[str]) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    from safetensors import safe_open

    with reading(path), safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def _from_bytes(data: bytes) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    from safetensors.torch import load

    tensors = load(data)
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return head.get("__metadata__", {}), tensors
