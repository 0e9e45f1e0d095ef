"""Ops that are called for their effect keep their order and their errors."""

from __future__ import annotations

import pytest
import torch

import lenz


def test_a_check_inside_of_an_op_still_raises() -> None:
    compiled = torch.compile(lambda x: torch.linalg.inv(x) + 1, backend="lenz")
    x = torch.eye(3) * 2
    torch.testing.assert_close(compiled(x), torch.linalg.inv(x) + 1)
    try:  # torch 2.11 drops the check when it traces, whatever the backend
        torch.compile(lambda x: torch.linalg.inv(x) + 1, backend="aot_eager")(torch.zeros(3, 3))
    except torch.linalg.LinAlgError:
        with pytest.raises(torch.linalg.LinAlgError):
            compiled(torch.zeros(3, 3))


def test_checks_of_matrices_are_calls_in_order() -> None:
    """Without tokens: the first matrix without an inverse is named, and no check is dropped."""
    fn = lambda x, y: (torch.linalg.inv(x) @ y, torch.linalg.inv(y), torch.linalg.cholesky(x))
    compiled, good = torch.compile(fn, backend="lenz"), torch.eye(3) * 2
    ops = [e.op for g in lenz.explain(fn)(good, good + 1).graphs for e in g.externs]
    assert ops.count("aten._linalg_check_errors.default") == 3, ops
    assert not [op for op in ops if "token" in op or "with_effects" in op]
    third = good - 3 * torch.eye(3)  # it has an inverse, but is not positive
    for x, y in ((torch.zeros(3, 3), good), (good, torch.ones(3, 3)), (third, good)):
        with pytest.raises(torch.linalg.LinAlgError) as told:
            fn(x, y)
        with pytest.raises(torch.linalg.LinAlgError) as ours:
            compiled(x, y)
        assert str(ours.value) == str(told.value)
    for got, want in zip(compiled(good, good + 1), fn(good, good + 1), strict=True):
        torch.testing.assert_close(got, want)
