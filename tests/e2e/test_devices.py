"""Tensors of devices that lenz has no target for run in eager, and the user is told once."""

from __future__ import annotations

import pytest
import torch


def test_a_graph_on_another_device_runs_in_eager() -> None:
    compiled = torch.compile(lambda x: (x + 1).relu(), backend="lenz")
    with pytest.warns(UserWarning, match="a tensor on meta"):
        result = compiled(torch.randn(3, 4, device="meta"))
    assert result.device.type == "meta"
    assert result.shape == (3, 4)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))
