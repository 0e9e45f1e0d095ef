"""All of torch's op database on the GPU, one test per op and dtype: eager and lenz agree.

float32 runs forward and backward.  `tests/e2e/sweep.py --device cuda` prints the same as a table.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.e2e.sweep import cases, sweep

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
# A look at the tests themselves on the CPU takes one op in this many.
STRIDE = 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per op and dtype; none where all would be skipped: to list them takes seconds."""
    on = metafunc.config.getoption("--on", default="cuda")
    if "op" in metafunc.fixturenames:
        missing = on == "cuda" and not torch.cuda.is_available()
        pairs = [] if missing else list(_pairs(on))
        ids = [f"{name}-{str(dtype)[6:]}" for name, _, dtype in pairs]
        metafunc.parametrize("op,dtype", [(op, dtype) for _, op, dtype in pairs], ids=ids)


def _pairs(on: str) -> Iterator[tuple[str, Any, torch.dtype]]:
    pytest.importorskip("expecttest", reason="torch's op database needs it")
    for k, op in enumerate(cases()):
        if on == "cpu" and k % STRIDE:
            continue
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        for dtype in DTYPES:
            if dtype in op.supported_dtypes(on):
                yield name, op, dtype


def test_an_op_agrees_with_eager(
    op: Any, dtype: torch.dtype, device: str, request: pytest.FixtureRequest
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = sweep(op, dtype, request.config.getoption("--samples", default=1), device=device)
    assert not row.failures, str(row)
    refused = [why for why in row.whole if device in why]
    assert not refused, f"lenz does not compile for {device}: {refused}"
    if not row.passed:
        pytest.skip("no sample that eager and aot_eager agree on")
