"""Ops that are called for their effect keep their order and their errors."""

from __future__ import annotations

import pytest
import torch


def test_a_check_inside_of_an_op_still_raises() -> None:
    compiled = torch.compile(lambda x: torch.linalg.inv(x) + 1, backend="lenz")
    x = torch.eye(3) * 2
    torch.testing.assert_close(compiled(x), torch.linalg.inv(x) + 1)
    try:  # torch 2.11 drops the check when it traces, whatever the backend
        torch.compile(lambda x: torch.linalg.inv(x) + 1, backend="aot_eager")(torch.zeros(3, 3))
    except torch.linalg.LinAlgError:
        with pytest.raises(torch.linalg.LinAlgError):
            compiled(torch.zeros(3, 3))
