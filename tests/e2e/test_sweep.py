"""A seeded sample of torch's op database; `sweep.py` runs all of it."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from tests.e2e.sweep import cases, sweep

SAMPLE = 60


def test_a_sample_of_all_ops_agrees_with_eager() -> None:
    pytest.importorskip("expecttest", reason="torch's op database needs it")
    everything = [op for op in cases() if torch.float32 in op.dtypes]
    chosen = random.Random(2).sample(everything, SAMPLE)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k, op in enumerate(chosen):
            other = [d for d in (torch.int64, torch.bool, torch.bfloat16) if d in op.dtypes]
            dtype = other[k % len(other)] if other and k % 2 else torch.float32
            rows.append(sweep(op, dtype, samples=1))
    bad = [str(r) for r in rows if r.failures]
    assert not bad, "\n".join(bad)
    assert sum(r.passed > 0 for r in rows) > SAMPLE * 0.8
