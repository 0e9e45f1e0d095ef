"""Programs of two processes on NCCL, each with a GPU of its own, beside eager.

Processes are spawned with the environment as it is: NCCL's settings are the caller's.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_nccl_available():
    pytest.skip("torch has no NCCL here", allow_module_level=True)

from tests.distributed.checks import ALL, random_mesh_programs, random_programs
from tests.distributed.ranks import failures


@pytest.fixture
def two(cuda: str) -> str:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return cuda


def test_collectives_and_models(two: str) -> None:
    said = failures(2, ALL, two)
    assert not said, said


def test_random_programs(two: str) -> None:
    said = failures(2, random_programs(range(200, 216)), two)
    assert not said, said


def test_random_mesh_programs(two: str) -> None:
    said = failures(2, random_mesh_programs(range(200, 208)), two)
    assert not said, said
