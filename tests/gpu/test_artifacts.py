"""Artifacts of programs on a GPU: another process loads and runs them without a compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import lenz
from lenz.artifact.container import read
from lenz.artifact.loaded import CompiledArtifact
from lenz.errors import UserError
from lenz.machine.cuda.loader import LOADER
from tests.arch.source import REPOSITORY

BATCH = Dim("batch", min=3, max=100)
# Compilers and what traces: a process that loads an artifact has none of these.
ABSENT = ("torch._dynamo", "torch._functorch.aot_autograd", "sympy", "triton", "lenz.pipeline")


class Attending(nn.Module):
    """A layer of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: Tensor = x + F.gelu(self.out(y.transpose(1, 2).reshape(x.shape)))
        return made


class Counted(nn.Module):
    """A buffer that each call writes, a constant on the GPU, a number, a view and an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        calls = self.get_buffer("calls").add_(1)
        there = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        return (x * there).cumsum(0) + calls, x.shape[0] * 3, x[1:], x


def images() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(2), nn.Softmax(-1)
    )
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


# Of each program its argument for a size of the batch.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "attending": (Attending, lambda n: torch.randn(n, 10, 64)),
    "counted": (Counted, lambda n: torch.randn(n, 3)),
    "images": (images, lambda n: torch.randn(n, 3, 9, 9)),
}


def made(
    name: str, path: Path, device: str, dynamic: bool = True, capabilities: tuple[str, ...] = ()
) -> tuple[nn.Module, Any]:
    """Export a case for a device: its module and its argument for a size."""
    torch.manual_seed(0)
    make, argument = CASES[name]
    module = make().eval().to(device)
    sizes = ({0: BATCH},) if dynamic else None
    given = (argument(7).to(device),)
    lenz.export(module, path, given, dynamic_shapes=sizes, compute_capabilities=capabilities)
    return module, lambda n: argument(n).to(device)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_results_are_the_modules(name: str, dynamic: bool, tmp_path: Path, device: str) -> None:
    module, argument = made(name, tmp_path / "m.lenz", device, dynamic)
    run = lenz.load(tmp_path / "m.lenz")
    for n in (7, 4, 100) if dynamic else (7, 7):
        x = argument(n)
        with torch.no_grad():
            got, want = run(x), module(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        if isinstance(got, tuple):
            assert got[2]._base is got[3] is x
        else:
            assert got.stride() == want.stride()
    for key, buffer in module.named_buffers():
        assert torch.equal(run.weights[key], buffer) and run.weights[key].device == buffer.device


def test_arguments_that_are_not_aligned(tmp_path: Path, device: str) -> None:
    """The example was: an artifact has no plan for other arguments, and so relies on nothing."""
    module, _ = made("attending", tmp_path / "m.lenz", device)
    x = torch.randn(1 + 5 * 640, device=device)[1:].view(5, 10, 64)
    with torch.no_grad():
        torch.testing.assert_close(lenz.load(tmp_path / "m.lenz")(x), module(x))


LOADS = """
import sys, json, torch, lenz
run = lenz.load(sys.argv[1])
x = torch.load(sys.argv[2], weights_only=True)
torch.save(run(x.to(sys.argv[3])), sys.argv[4])
print(json.dumps([name for name in sys.argv[5:] if name in sys.modules]))
"""


def test_another_process_imports_no_compiler(tmp_path: Path, device: str) -> None:
    module, argument = made("attending", tmp_path / "m.lenz", device)
    x = argument(5)
    torch.save(x.cpu(), tmp_path / "x")
    given = [str(tmp_path / "m.lenz"), str(tmp_path / "x"), device, str(tmp_path / "y"), *ABSENT]
    told = subprocess.run(
        [sys.executable, "-c", LOADS, *given], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == []
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "y", weights_only=True), module(x))


def test_another_gpu_is_rejected(tmp_path: Path, cuda: str) -> None:
    made("counted", tmp_path / "m.lenz", cuda)
    contents = read(tmp_path / "m.lenz")
    for variant in contents.manifest["variants"]:
        variant["code"] = {device: {"cuda-35": {}} for device in variant["code"]}
    with pytest.raises(UserError, match="this artifact is for cuda-35, and cuda:0 has"):
        CompiledArtifact(contents)


def test_cubins_for_several_compute_capabilities(tmp_path: Path, cuda: str) -> None:
    """Each is for its own architecture, and this GPU runs those for itself."""
    module, argument = made("attending", tmp_path / "m.lenz", cuda, capabilities=("8.0", "10.0"))
    contents = read(tmp_path / "m.lenz")
    ((device, known),) = contents.manifest["variants"][0]["code"].items()
    here = "compute capability {}.{}".format(*torch.cuda.get_device_capability())
    assert {*known} == {here, "compute capability 8.0", "compute capability 10.0"}
    assert all(pieces.keys() == known[here].keys() for pieces in known.values())
    x = argument(5)
    with torch.no_grad():
        torch.testing.assert_close(lenz.load(tmp_path / "m.lenz")(x), module(x))
    for variant in contents.manifest["variants"]:
        del variant["code"][device][here]
    if not any(LOADER.runs(other, here) for other in known):
        told = r"is for compute capability 10\.0 or compute capability 8\.0, and cuda"
        with pytest.raises(UserError, match=told):
            CompiledArtifact(contents)


def test_a_gpu_of_the_same_capability_runs_it(
    tmp_path: Path, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, argument = made("attending", tmp_path / "m.lenz", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "another GPU")
    x = argument(5)
    with torch.no_grad():
        torch.testing.assert_close(lenz.load(tmp_path / "m.lenz")(x), module(x))


def test_arguments_elsewhere_are_rejected(tmp_path: Path, cuda: str) -> None:
    _, argument = made("counted", tmp_path / "m.lenz", cuda)
    with pytest.raises(UserError, match=r"on cpu, and the program takes .* on cuda"):
        lenz.load(tmp_path / "m.lenz")(argument(5).cpu())


def test_inside_another_compiler(device: str) -> None:
    def other(gm: Any, inputs: list[Any]) -> Callable[..., Any]:
        return lenz.standalone_compile(gm, inputs)

    fn = torch.compile(
        lambda x: torch.softmax(x @ x.mT, -1) + x.shape[0], backend=other, dynamic=True
    )
    for n in (4, 7):
        x = torch.randn(n, 8, device=device)
        with torch.no_grad():
            torch.testing.assert_close(fn(x), torch.softmax(x @ x.mT, -1) + n)


def test_commands(tmp_path: Path, device: str) -> None:
    """`inspect` tells the device, `run` takes arrays there."""
    import numpy as np

    module, argument = made("attending", tmp_path / "m.lenz", device)
    x = argument(5)
    np.save(tmp_path / "x.npy", x.cpu().numpy())

    def ask(*args: str) -> str:
        command = [sys.executable, "-m", "lenz", *args]
        told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        return told.stdout

    path = str(tmp_path / "m.lenz")
    assert device in ask("inspect", path)
    ask("run", path, "--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "out"))
    (found,) = (tmp_path / "out").iterdir()
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(np.load(found)), module(x).cpu())
