"""Artifacts that are damaged, foreign, or of other versions: refused, and nothing of them runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import lenz
from lenz.artifact import container
from lenz.artifact.show import summary
from lenz.errors import UserError, untrusted
from tests.arch.source import REPOSITORY


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of an artifact."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("artifact") / "m.lenz"
    lenz.export(nn.Linear(3, 4), path, (torch.ones(2, 3),), levels=("host",))
    return path.read_bytes()


def manifest_of(data: bytes) -> dict[str, Any]:
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    found: dict[str, Any] = json.loads(head["lenz"])
    return found


def changed(data: bytes, manifest: dict[str, Any]) -> bytes:
    """The artifact with another manifest, whose checksum is right."""
    text = json.dumps(manifest, sort_keys=True)
    told = {"lenz": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return save(load(data), told)


@pytest.mark.parametrize(
    "how, why",
    [
        ({"torch": "1.0.0"}, r"for torch 1\.0, and this is torch 2"),
        ({"format": 99}, "has format 99; this lenz reads 2"),
        ({"machine": "vax"}, "for vax, and this is"),
        ({"sums": {}}, "tensors are missing"),
    ],
)
def test_another_version_is_refused(good: bytes, how: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        lenz.load(changed(good, manifest_of(good) | how))


def test_a_plan_that_this_lenz_cannot_read_is_refused(good: bytes) -> None:
    manifest = manifest_of(good)
    manifest["variants"][0]["plan"] = "plan graph { nonsense }"
    with pytest.raises(UserError, match="from another lenz"):
        lenz.load(changed(good, manifest))


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place in a manifest: what holds it, and its key there."""
    for key in sorted(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places_of(value[key])


@pytest.mark.parametrize("new", [None, -1, "x", [], {}, "absent"], ids=repr)
def test_a_manifest_of_other_data_is_refused_or_loads(good: bytes, new: Any) -> None:
    """Whoever edits a manifest can make its checksum right too."""
    refused = 0
    for number in range(len([*places_of(manifest_of(good))])):
        other = manifest_of(good)
        holder, key = [*places_of(other)][number]
        if new == "absent":
            del holder[key]
        else:
            holder[key] = new
        try:
            lenz.load(data := changed(good, other))
        except UserError:
            refused += 1
        with contextlib.suppress(UserError), untrusted("damaged"):
            summary(container.read(data), plan=True)
    assert refused > 10


@pytest.mark.parametrize("seed", range(4))
def test_mutated_bytes_are_refused_or_right(good: bytes, seed: int) -> None:
    """100,000 files with flips, cuts, insertions and copies, in all."""
    random.seed(seed)
    x = torch.ones(2, 3)
    want = lenz.load(good)(x)
    refused = 0
    for _ in range(25_000):
        data = bytearray(good)
        for _ in range(random.choice((1, 1, 1, 2, 8))):
            at = random.randrange(len(data))
            match random.randrange(5):
                case 0:
                    data[at] ^= 1 << random.randrange(8)
                case 1:
                    data[at] = random.randrange(256)
                case 2:
                    del data[at : at + random.randrange(1, 64)]
                case 3:
                    data[at:at] = random.randbytes(random.randrange(1, 64))
                case 4:
                    start = random.randrange(len(data))
                    data[at : at + 16] = data[start : start + 16]
            if not data:
                break
        try:
            run = lenz.load(bytes(data))
        except UserError:
            refused += 1
            continue
        assert torch.equal(run(x), want)
    assert refused > 20_000


def test_each_word_of_a_weight_is_checked(tmp_path: Path) -> None:
    """Large weights are checked by sums of rows: the last byte, words that change places."""
    path = tmp_path / "m.lenz"
    weight = torch.randn(200, 200)
    layer = nn.Linear(200, 200)
    layer.weight = nn.Parameter(weight)
    lenz.export(layer, path, (torch.ones(2, 200),), levels=("host",))
    good, own = path.read_bytes(), weight.numpy().tobytes()
    start, row = good.index(own), 8 * container.ROW
    assert len(own) > 3 * row
    changes = {k: bytes([good[start + k] ^ 128]) for k in (0, row - 1, row, len(own) - 1)}
    changes |= {0: own[row : 2 * row] + own[:row], 2 * row: bytes(row)}
    for at, data in changes.items():
        there = start + at
        bad = good[:there] + data + good[there + len(data) :]
        with pytest.raises(UserError, match=r"'weight\.weight' has changed"):
            lenz.load(bad)
    odd = container.digest("weight.x", torch.zeros(row + 1, dtype=torch.uint8)[1:])
    assert odd == container.digest("weight.x", torch.zeros(row, dtype=torch.uint8))


def test_other_files_are_refused(good: bytes, tmp_path: Path) -> None:
    for name, data in {"empty": b"", "text": b"import os\n" * 50, "weights": save({})}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match="not a lenz artifact"):
            lenz.load(tmp_path / name)
    with pytest.raises(UserError, match=r"^cannot read .*: No such file"):
        lenz.load(tmp_path / "absent")
    with pytest.raises(UserError, match=r"^this artifact is damaged: the manifest has changed$"):
        lenz.load(save(load(good), {"lenz": "{}", "sha256": "0"}))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        lenz.load(tmp_path / "pipe")


MANY = """
import sys, torch, lenz
run = lenz.load(sys.argv[1])
x = torch.ones(2, 3)
want = run(x)
for k in range(20):
    run.save(sys.argv[1])
    run = lenz.load(sys.argv[1])
    assert torch.equal(run(x), want)
"""


@pytest.mark.rest
@pytest.mark.slow
def test_processes_that_save_and_load_at_once(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.lenz").write_bytes(good)
    command = [sys.executable, "-c", MANY, str(tmp_path / "m.lenz")]
    running = [subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE) for _ in range(8)]
    for p in running:
        assert p.wait(120) == 0, p.stderr and p.stderr.read().decode()
    assert [p.name for p in tmp_path.iterdir()] == ["m.lenz"]
