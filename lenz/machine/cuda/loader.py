"""Compiled kernels of NVIDIA GPUs: one cubin each, loaded by the driver."""

from __future__ import annotations

from collections.abc import Mapping

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
    """The GPU and the compiler."""
    gpu = torch.device(device).index or 0
    return f"{torch.cuda.get_device_name(gpu)} {driver.capability(gpu)} {version()}"


LOADER = Loader(
    "cubin", lambda kernels: {n: f"{n}.cubin" for n in kernels}, load, key, wake, capture_graph
)
register("cuda", LOADER)
