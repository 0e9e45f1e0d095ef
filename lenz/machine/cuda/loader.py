"""Compiled kernels of NVIDIA GPUs: one cubin each, loaded by the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from lenz.ir.binary import decode
from lenz.machine.cuda import driver
from lenz.machine.cuda.graph import capture_graph
from lenz.machine.cuda.triton.compile import version
from lenz.machine.cuda.triton.pool import wake
from lenz.machines import Counts, Functions, Loader, register


def load(pieces: Mapping[str, bytes], kernels: Counts, device: str) -> tuple[Functions, object]:
    """Load kernels on a GPU; they stay loaded."""
    gpu = torch.device(device).index or 0
    return {n: driver.function(decode(pieces[n]), gpu, *c) for n, c in kernels.items()}, None


def key(device: str) -> str:
    """The GPU and the compiler. Shapes of tiles may have been chosen by timing on this GPU."""
    gpu = torch.device(device).index or 0
    return f"{torch.cuda.get_device_name(gpu)} {driver.capability(gpu)} {version()}"


def fits(device: str) -> str:
    """The compute capability: all GPUs that share it run the same cubins."""
    return f"compute capability {driver.capability(torch.device(device).index or 0) / 10}"


def files(kernels: Iterable[str]) -> dict[str, str]:
    """A file for each kernel."""
    return {name: f"{name}.cubin" for name in kernels}


LOADER = Loader("cubin", files, load, key, fits, wake, capture_graph)
register("cuda", LOADER)
