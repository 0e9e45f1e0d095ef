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
    """The GPU and the compiler. Shapes of tiles may have been chosen by timing on this GPU."""
    gpu = torch.device(device).index or 0
    return f"{torch.cuda.get_device_name(gpu)} {driver.capability(gpu)} {version()}"


def compute_capability(device: str) -> str:
    """All GPUs that share it run the same cubins."""
    return f"compute capability {driver.capability(torch.device(device).index or 0) / 10}"


def runs_cubin(made: str, here: str) -> bool:
    """A cubin runs on GPUs of its major number whose minor one, a digit, is not lower.

    CUDA C++ Programming Guide, "Binary Compatibility". From 9.0 on Triton compiles for features of
    one architecture ("sm_100a"): such code runs nowhere else.
    """
    return made == here or (made[:-1] == here[:-1] and made <= here and float(made.split()[-1]) < 9)


FILES = lambda kernels: {n: f"{n}.cubin" for n in kernels}
LOADER = Loader("cubin", FILES, load, key, compute_capability, wake, capture_graph, runs_cubin)
register("cuda", LOADER)
