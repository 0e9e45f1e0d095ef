"""Artifacts for people: a summary in words, and arrays from and to files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lenz.artifact.container import Contents, Manifest
from lenz.errors import untrusted
from lenz.private import naming, reading, replacing
from lenz.target import HOST

MIB = 2**20
SHOWN = 6  # first elements of a result
DIGITS = 18  # that any integer of 64 bits can have


def summary(contents: Contents, *, plan: bool) -> str:
    """The contents of an artifact, one per line; `plan` adds the plan's text for the best CPU.

    Names come from the file, so they are printed as literals.
    """
    return "".join(f"{line}\n" for line in _lines(contents, plan))


def _lines(contents: Contents, plan: bool) -> Iterator[str]:
    m, call = contents.manifest, contents.manifest["call"]
    yield f"program   {m['name']!a}, by lenz {m['lenz']!a} for torch {m['torch']!a}"
    yield f"machine   {m['machine']!a}"
    for device, known in m["variants"][0]["code"].items() if m["variants"] else ():
        if device != HOST:
            yield f"device    {device!a}: {', '.join(map(ascii, known))}"
    for k, g in enumerate(call["given"]):
        yield f"argument  {k}: {_argument(g)}"
    taken = [f"argument {k}" for k, g in enumerate(call["given"]) if "is" not in g]
    held = [*(ascii(w["name"]) for w in call["weights"]), *taken]
    for place, k in call["written"]:
        yield f"writes    {held[k]}, by result {place}"
    for w in call["weights"]:
        yield f"weight    {w['name']!a}: {_weight(w, contents.tensors)}"
    for v in m["variants"]:
        names = [n for known in v["code"].values() for p in known.values() for n in p.values()]
        size = sum(contents.tensors[n].numel() for n in names)
        needs = ", ".join(map(ascii, v["features"])) or "no special features"
        yield f"code      {len(names)} pieces, {_size(size)}; needs {needs}"
    if plan and m["variants"]:
        yield ""
        yield from (ascii(line)[1:-1] for line in m["variants"][0]["plan"].splitlines())


def _argument(g: Mapping[str, Any]) -> str:
    if "is" in g:
        return f"always {g['is']!a}"
    if g["kind"] == "number":
        return "an integer"
    ends = [f"{low}" if low == high else f"{low} to {'any' if high is None else high}"
            for low, high in g["size"]]  # fmt: skip
    return f"{g['dtype']!a} of size [{', '.join(ends)}] on {g['device']!a}"


def _weight(w: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    t = tensors[w["tensor"]]
    dtype = str(t.dtype).removeprefix("torch.")
    return f"{dtype} {list(w['size'])} on {w['device']!a}, {_size(t.numel() * t.element_size())}"


def _size(n: int) -> str:
    return f"{n / MIB:.1f} MiB" if n >= MIB else f"{n / 1024:.1f} KiB"


def arrays_for(texts: Sequence[str], m: Manifest) -> list[Tensor | int]:
    """Arguments from the command line, on the devices of the program's own."""
    devices = [g.get("device", HOST) for g in m["call"]["given"] if "is" not in g]
    found = zip(map(_array_of, texts), chain(devices, repeat(HOST)), strict=False)
    return [x.to(device) if isinstance(x, Tensor) else x for x, device in found]


def _array_of(text: str) -> Tensor | int:
    """The array in a .npy file, or an integer."""
    if text.removeprefix("-").isdecimal() and len(text) <= DIGITS:
        return int(text)
    not_one = f"{text!r} is not an array for torch"
    with reading(text, "inputs are .npy files or integers below 1e18") as file, untrusted(not_one):
        return torch.from_numpy(np.lib.format.read_array(file, allow_pickle=False))


def result_line(k: int, value: Any) -> str:
    """One result: type, sizes, first elements."""
    if not isinstance(value, Tensor):
        return f"result {k}: {value!r}"
    first = ", ".join(f"{x:.6g}" if isinstance(x, float) else str(x)
                      for x in value.reshape(-1)[:SHOWN].tolist())  # fmt: skip
    more = ", ..." if value.numel() > SHOWN else ""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"result {k}: {dtype} {list(value.shape)} [{first}{more}]"


def write_arrays(folder: Path, results: Sequence[Any]) -> None:
    """Write tensors as 0.npy, 1.npy ...; types that NumPy lacks as float32 or complex64."""
    with naming(f"cannot write {str(folder)!r}"):
        folder.mkdir(parents=True, exist_ok=True)
    for k, value in enumerate(results):
        if isinstance(value, Tensor):
            with replacing(folder / f"{k}.npy") as file:
                np.save(file, _array(value), allow_pickle=False)


def _array(t: Tensor) -> Any:
    try:
        return t.numpy(force=True)
    except TypeError:  # NumPy lacks its type
        return t.to(torch.complex64 if t.is_complex() else torch.float32).numpy(force=True)
