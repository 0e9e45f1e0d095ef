"""Normalisations against eager, by the interpreter: results and what they save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import check, lowered
from torch.nn import functional

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
# (input, parameters): the pairs eager takes.
MIXES = [(d, d) for d in FLOATS] + [(d, torch.float32) for d in HALVES]


@pytest.mark.parametrize(("dtype", "param"), MIXES, ids=str)
def test_layer_norm(dtype: torch.dtype, param: torch.dtype) -> None:
    """One and two normalised dimensions; with and without weight and bias."""
    for shape, inner in (((3, 5), 1), ((2, 3, 4), 2), ((6,), 1), ((0, 4), 1)):
        x = torch.randn(shape).to(dtype)
        size = shape[len(shape) - inner :]
        w, c = torch.randn(size).to(param), torch.randn(size).to(param)
        check(lambda x, w, c: aten.native_layer_norm(x, size, w, c, 1e-5), x, w, c)
        check(lambda x, w: aten.native_layer_norm(x, size, w, None, 1e-3), x, w)
        check(lambda x: aten.native_layer_norm(x, size, None, None, 1e-5), x)
    check(lambda x: functional.layer_norm(x, (3,)), torch.randn(3, 4).to(dtype).t())


def test_layer_norm_far_from_zero() -> None:
    """A mean of 10^3 deviations does not spoil the variance."""
    x = torch.randn(4, 256) + 1e3
    check(lambda x: functional.layer_norm(x, (256,)), x, tolerance=(1e-3, 1e-4))


@pytest.mark.parametrize(("dtype", "param"), MIXES, ids=str)
def test_group_norm(dtype: torch.dtype, param: torch.dtype) -> None:
    """One group, some, and one per channel; no, one and two spatial dimensions."""
    for shape, groups in (((2, 6, 3), 2), ((2, 4, 3, 2), 4), ((2, 4, 2, 2), 1), ((3, 4), 2)):
        x = torch.randn(shape).to(dtype)
        w, c = torch.randn(shape[1]).to(param), torch.randn(shape[1]).to(param)
        n, rest = shape[0], x.numel() // (shape[0] * shape[1])

        def fn(x: Any, w: Any, c: Any) -> Any:
            return aten.native_group_norm(x, w, c, n, shape[1], rest, groups, 1e-5)

        check(fn, x, w, c)
        check(lambda x: fn(x, None, None), x)
    x = torch.randn(2, 4, 3, 5).to(dtype).to(memory_format=torch.channels_last)
    check(lambda x: functional.group_norm(x, 2), x)


@pytest.mark.parametrize(("dtype", "param"), MIXES, ids=str)
def test_batch_norm_training(dtype: torch.dtype, param: torch.dtype) -> None:
    """Batch statistics, saved ones, and the new running statistics."""
    for shape in ((4, 3), (4, 3, 5), (2, 3, 4, 2)):
        x = torch.randn(shape).to(dtype)
        w, c = torch.randn(3).to(param), torch.randn(3).to(param)
        m, v = torch.randn(3).to(param), torch.rand(3).to(param)

        def fn(x: Any, w: Any, c: Any, m: Any, v: Any) -> Any:
            return aten._native_batch_norm_legit_functional(x, w, c, m, v, True, 0.1, 1e-5)

        check(fn, x, w, c, m, v)
        check(lambda x, m, v: fn(x, None, None, m, v), x, m, v)
        no_stats = aten._native_batch_norm_legit.no_stats
        check(lambda x, w, c: no_stats(x, w, c, True, 0.1, 1e-5), x, w, c)


@pytest.mark.parametrize(("dtype", "param"), MIXES, ids=str)
def test_batch_norm_evaluation(dtype: torch.dtype, param: torch.dtype) -> None:
    """Running statistics; what is saved is empty."""
    for shape in ((4, 3), (2, 3, 4, 2), (0, 3)):
        x = torch.randn(shape).to(dtype)
        w, c = torch.randn(3).to(param), torch.randn(3).to(param)
        m, v = torch.randn(3).to(param), torch.rand(3).to(param)
        no_training = aten._native_batch_norm_legit_no_training
        check(lambda x, w, c, m, v: no_training(x, w, c, m, v, 0.1, 1e-5), x, w, c, m, v)
        check(lambda x, m, v: no_training(x, None, None, m, v, 0.1, 1e-5), x, m, v)
        check(lambda x, m, v: functional.batch_norm(x, m, v), x, m, v)


def test_batch_norm_with_update() -> None:
    """The form with a reserve, and one element per channel: NaN variance when unbiased."""

    def fn(x: Any, w: Any, c: Any, m: Any, v: Any) -> Any:
        return aten._batch_norm_with_update_functional(x, w, c, m, v, 0.3, 1e-5)

    args = (torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3))
    check(fn, torch.randn(2, 3, 4), *args)
    check(fn, torch.randn(1, 3), *args)


def test_batch_norm_mutates_its_statistics() -> None:
    """The module in training: the new statistics are written into the old."""

    def fn(x: Any, m: Any, v: Any) -> Any:
        return functional.batch_norm(x, m, v, training=True, momentum=0.2)

    check(fn, torch.randn(4, 3, 2), torch.zeros(3), torch.ones(3))


def test_batch_statistics_far_from_zero() -> None:
    """The sums in f64 keep the variance of values whose mean is 10^3 deviations."""
    x = torch.randn(512, 2) + 1e3
    check(lambda x: functional.batch_norm(x, None, None, training=True), x, tolerance=(1e-3, 1e-4))


@pytest.mark.parametrize(("dtype", "param"), MIXES, ids=str)
def test_rms_norm(dtype: torch.dtype, param: torch.dtype) -> None:
    """With a given and a default epsilon."""
    x, w = torch.randn(3, 5).to(dtype), torch.randn(5).to(param)
    small = x * 1e-3
    if dtype is param:
        check(lambda x, w: aten._fused_rms_norm(x, (5,), w, 1e-5), x, w)
    check(lambda x: aten._fused_rms_norm(x, (5,), None, 1e-5)[0], x)
    if dtype not in HALVES:
        check(lambda x: torch.rms_norm(x, (3, 5)), x)
    if dtype is torch.float32:
        got = lowered(lambda x: aten._fused_rms_norm(x, (5,), None, None)[0], (small,))
        assert "1.1920929e-07" in repr_graph(got)


def repr_graph(g: Any) -> str:
    """The text of a graph."""
    from lenz.ir.printer import show

    return str(show(g))


def test_symbolic_sizes() -> None:
    """Counts follow the sizes of the call."""
    x = torch.randn(4, 6, 5)
    check(lambda x: functional.layer_norm(x, x.shape[1:]), x, dynamic=True)
    check(lambda x: functional.group_norm(x, 2), x, dynamic=True)
    check(lambda x: functional.batch_norm(x, None, None, training=True), x, dynamic=True)
    check(lambda x: functional.instance_norm(x), x, dynamic=True)


def test_number_of_loops() -> None:
    """Mean, deviation, result."""
    x = torch.randn(4, 6, 5)
    assert len(lowered(lambda x: functional.layer_norm(x, (5,)), (x,)).nodes) == 3
    assert len(lowered(lambda x: functional.group_norm(x, 2), (x,)).nodes) == 3
