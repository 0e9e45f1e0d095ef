"""Programs of 2 and 4 processes on gloo, beside eager.

python -m tests.distributed --ranks 4 --from 100 --seeds 50      more random programs
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch has no gloo here", allow_module_level=True)

from tests.distributed.checks import ALL, SOME, random_mesh_programs, random_programs
from tests.distributed.ranks import failures


def test_two_ranks() -> None:
    said = failures(2, SOME)
    assert not said, said


@pytest.mark.rest
def test_more_of_two_ranks() -> None:
    others = [c for c in ALL if c not in SOME]
    said = failures(
        2, [*others, *random_programs(range(100, 104)), *random_mesh_programs(range(4))]
    )
    assert not said, said


@pytest.mark.rest
def test_four_ranks() -> None:
    said = failures(
        4, [*SOME, *random_programs(range(104, 106)), *random_mesh_programs(range(4, 6))]
    )
    assert not said, said
