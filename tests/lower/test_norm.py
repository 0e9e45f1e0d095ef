"""Normalisations against eager, by the interpreter: results and what they save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from lenz.context import Context
from lenz.errors import Unsupported
from lenz.ir.expr import all_syms
from lenz.ir.graph import LOOPS, bodies_of, loop_axes, reads_of
from lenz.ir.printer import show
from lenz.opt import PASSES
from lenz.options import Options
from lenz.sym.divide import divisions_of
from lenz.target import Target
from tests.lower.harness import TOLERANCE, check, lowered
from tests.lower.single import outputs_of, single

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)

# (input, parameters): the pairs eager takes.
MIXES = [(d, d) for d in FLOATS] + [(d, torch.float32) for d in HALVES]


def known(x: Any, w: Any, found: Any) -> Any:
    """The results to compare: for mixed types fake tensors and eager disagree on the rest."""
    return found if w is None or x.dtype is w.dtype else found[0]


@pytest.mark.parametrize(("dtype", "param"), MIXES, ids=str)
def test_layer_norm(dtype: torch.dtype, param: torch.dtype) -> None:
    """One and two normalised dimensions; with and without weight and bias."""
    norm = aten.native_layer_norm
    for shape, inner in (((3, 5), 1), ((2, 3, 4), 2), ((6,), 1), ((0, 4), 1)):
        x = torch.randn(shape).to(dtype)
        size = shape[len(shape) - inner :]
        w, c = torch.randn(size).to(param), torch.randn(size).to(param)
        check(lambda x, w, c: known(x, w, norm(x, size, w, c, 1e-5)), x, w, c)
        check(lambda x, w: known(x, w, norm(x, size, w, None, 1e-3)), x, w)
        check(lambda x: norm(x, size, None, None, 1e-5), x)
    check(lambda x: functional.layer_norm(x, (3,)), torch.randn(3, 4).to(dtype).t())


def test_norms_of_nothing_are_eagers() -> None:
    x = torch.randn(3, 1)
    check(lambda x: functional.layer_norm(x[:, 1:], (0,)), x, native=False)
    check(lambda x: functional.group_norm(x[:, 1:], 1), x, native=False)


def test_a_group_norm_by_other_sizes_than_its_own_is_eagers() -> None:
    """Eager takes any that have as many elements."""
    x = torch.randn(2, 6, 3)
    fn = lambda x, n, rest: aten.native_group_norm(x, None, None, n, 6, rest, 2, 1e-5)[0]
    torch.testing.assert_close(torch.compile(fn, backend="lenz")(x, 3, 2), fn(x, 3, 2))
    with pytest.raises(RuntimeError, match="to be true, but got false"):
        torch.compile(fn, backend="lenz")(x, 2, -1)


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
            found = aten.native_group_norm(x, w, c, n, shape[1], rest, groups, 1e-5)
            return known(x, w, found)

        check(fn, x, w, c)
        check(lambda x: fn(x, None, None), x)
    for dynamic in (False, True):
        x = torch.randn(2, 4, 3, 5).to(dtype).to(memory_format=torch.channels_last)
        check(lambda x: functional.group_norm(x, 2), x, dynamic=dynamic)


def test_groups_of_channels_last_are_read_in_order() -> None:
    """Statistics are copied for each channel: a quotient per element would be a gather."""

    def grads(x: Any, w: Any, dy: Any) -> Any:
        y, mean, rstd = aten.native_group_norm(x, w, w, 2, 32, 64, 8, 1e-5)
        back = aten.native_group_norm_backward
        return y, *back(dy, x, mean, rstd, w, 2, 32, 64, 8, [True] * 3)

    x = torch.randn(2, 32, 8, 8).to(memory_format=torch.channels_last)
    g = lowered(grads, [x, torch.randn(32), torch.randn_like(x)])
    cx = Context(Options(), Target("cpu"))
    for run in PASSES.values():
        g = run(g, cx)
    large = [n for n in g.nodes if isinstance(n, LOOPS) and g.inputs[0].name in reads_of(n)]
    assert len(large) == 5
    for n in large:
        inner = [a.var for a in loop_axes(n)]
        assert not any(divisions_of(s, inner) for s in all_syms(*bodies_of(n))), show(g)


@pytest.mark.parametrize(("dtype", "param"), MIXES, ids=str)
def test_batch_norm_training(dtype: torch.dtype, param: torch.dtype) -> None:
    """Batch statistics, saved ones, and the new running statistics."""
    for shape in ((4, 3), (4, 3, 5), (2, 3, 4, 2)):
        x = torch.randn(shape).to(dtype)
        w, c = torch.randn(3).to(param), torch.randn(3).to(param)
        m, v = torch.randn(3).to(param), torch.rand(3).to(param)

        def fn(x: Any, w: Any, c: Any, m: Any, v: Any) -> Any:
            found = aten._native_batch_norm_legit_functional(x, w, c, m, v, True, 0.1, 1e-5)
            if x.dtype not in HALVES:
                return found
            return (found[0], *found[3:]) if m.dtype is torch.float32 else found[0]

        check(fn, x, w, c, m, v)
        check(lambda x, m, v: fn(x, None, None, m, v), x, m, v)
        no_stats = aten._native_batch_norm_legit.no_stats
        check(
            lambda x, w, c: no_stats(x, w, c, True, 0.1, 1e-5)[: 1 if x.dtype in HALVES else 3],
            x,
            w,
            c,
        )


@pytest.mark.parametrize(("dtype", "param"), MIXES, ids=str)
def test_batch_norm_evaluation(dtype: torch.dtype, param: torch.dtype) -> None:
    """Running statistics; what is saved is empty."""
    for shape in ((4, 3), (2, 3, 4, 2), (0, 3)):
        x = torch.randn(shape).to(dtype)
        w, c = torch.randn(3).to(param), torch.randn(3).to(param)
        m, v = torch.randn(3).to(param), torch.rand(3).to(param)
        no_training = aten._native_batch_norm_legit_no_training
        check(
            lambda x, w, c, m, v: known(x, w, no_training(x, w, c, m, v, 0.1, 1e-5)), x, w, c, m, v
        )
        check(lambda x, m, v: no_training(x, None, None, m, v, 0.1, 1e-5)[0], x, m, v)
        check(lambda x, m, v: functional.batch_norm(x, m, v), x, m, v)


def test_batch_norm_with_update() -> None:
    """The form with a reserve, which is empty on CPU."""
    args = (torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3))
    op = aten._batch_norm_with_update_functional.default
    x = torch.randn(2, 3, 4)
    wanted = aten._native_batch_norm_legit_functional(x, *args, True, 0.3, 1e-5)
    y, mean, invstd, reserve, new_mean, new_var = outputs_of(op, x, *args, 0.3, 1e-5)
    assert reserve.shape == (0,) and reserve.dtype is torch.uint8
    torch.testing.assert_close((y, mean, invstd, new_mean, new_var), wanted)


def test_batch_norm_mutates_its_statistics() -> None:
    """The form that writes: the new statistics are written into the old."""

    def fn(x: Any, m: Any, v: Any) -> Any:
        return aten._native_batch_norm_legit(x, None, None, m, v, True, 0.2, 1e-5)

    check(fn, torch.randn(4, 3, 2), torch.zeros(3), torch.ones(3))


def test_batch_norm_with_hidden_writes() -> None:
    """An op that writes without saying so cannot be called in eager either: refused."""
    args = (torch.randn(4, 3), None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)
    with pytest.raises(Unsupported):
        single(aten.native_batch_norm.default, *args)


def test_batch_statistics_far_from_zero() -> None:
    """The sums in f64 keep the variance of values whose mean is 10^3 deviations."""
    x = torch.randn(512, 2) + 1e3
    check(lambda x: functional.batch_norm(x, None, None, training=True), x, tolerance=(1e-3, 1e-4))


@pytest.mark.parametrize(("dtype", "param"), MIXES, ids=str)
def test_rms_norm(dtype: torch.dtype, param: torch.dtype) -> None:
    """The fused op with a given and a default epsilon; on CPU eager takes it apart."""
    w = torch.randn(5).to(param)
    op = aten._fused_rms_norm.default
    rtol, atol = TOLERANCE[dtype]
    for scale, eps in ((1.0, 1e-5), (1e-3, None)):
        x = (torch.randn(3, 5) * scale).to(dtype)
        for weight in (None, w) if dtype is param else (None,):
            y, rstd = outputs_of(op, x, (5,), weight, eps)
            wanted = op(x, (5,), weight, eps)
            torch.testing.assert_close(y, wanted[0], rtol=rtol, atol=atol)
            torch.testing.assert_close(rstd.to(wanted[1].dtype), wanted[1], rtol=rtol, atol=atol)


def test_symbolic_sizes() -> None:
    """Counts follow the sizes of the call."""
    x = torch.randn(4, 6, 5)
    check(lambda x: functional.layer_norm(x, x.shape[1:]), x, dynamic=True)
    check(lambda x: functional.group_norm(x, 2), x, dynamic=True)
    check(lambda x: functional.batch_norm(x, None, None, training=True), x, dynamic=True)
    check(lambda x: functional.instance_norm(x), x, dynamic=True)


def test_number_of_loops() -> None:
    """Over data: mean, its correction, deviation, result; over rows: both corrected statistics."""
    x = torch.randn(4, 6, 5)
    assert len(lowered(lambda x: functional.layer_norm(x, (5,)), (x,)).nodes) == 6
    assert len(lowered(lambda x: functional.group_norm(x, 2), (x,)).nodes) == 6
