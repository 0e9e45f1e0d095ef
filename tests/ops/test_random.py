"""Philox against the published answers, and the statistics of what is made of its bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from lenz import ops
from lenz.ir.dtype import F32, F64, I64, U32, DType
from lenz.ir.expr import Expr, const, index, interpret, nodes_of, rebuild, ref
from lenz.ir.interp_expr import evaluate_exprs
from lenz.ir.op import INDEX
from lenz.ops.random import RAND_BITS, philox, philox_reference
from lenz.sym import Var
from tests.ops.lanes import Lanes
from tests.ops.test_forms import emit, evaluate

# counter, key, result: the known answers of the Random123 library for philox2x32, 10 rounds.
ANSWERS = [
    ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
    ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
]


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_known_answers(counter: tuple[int, int], key: int, answer: tuple[int, int]) -> None:
    assert tuple(int(w) for w in philox_reference(counter, key)) == answer
    a, b = (const(v, U32) for v in counter)
    words = philox((a, b), const(key, U32))
    assert tuple(w.attrs[0] for w in words) == answer


N = 200_000
SEED, PLACE = ref("seed", I64), ref("place", I64)
START = const(-5, I64)
VALUES = {"seed": torch.full((N,), -1234567890123), "place": torch.arange(N) + 2**33 - 1000}


def test_the_expansion_gives_the_bits_of_the_reference() -> None:
    values = {k: v[:3000] for k, v in VALUES.items()}
    for word in range(4):
        made = ops.rand_bits(SEED, PLACE, word)
        want = evaluate(made, values)
        torch.testing.assert_close(emit(made, values, Lanes(3000)), want, rtol=0, atol=0)


def test_neighbours_share_a_counter() -> None:
    values = {k: v[:3000] for k, v in VALUES.items()}
    made = ops.shared_bits(SEED, START, PLACE)
    want = evaluate(made, values)
    torch.testing.assert_close(emit(made, values, Lanes(3000)), want, rtol=0, atol=0)
    halves = values | {"place": values["place"] // 2 - 5}
    for word in (0, 1):
        mine = evaluate(ops.rand_bits(SEED, PLACE, word), halves)
        of_word = values["place"] % 2 == word
        assert torch.equal(mine[of_word], want[of_word])


def test_the_number_of_an_element_is_added_in_words_of_32_bits() -> None:
    """start + number, with a carry into the upper word, as the 64-bit sum has it."""
    count = 3000
    number = Var("i", 0, count - 1)
    values = {"seed": torch.full((count,), -7), "start": torch.full((count,), 2**32 - 1500)}
    place = ops.add(ref("start", I64), index(number, I64))
    made = interpret(
        ops.rand_bits(SEED, place, 3), lambda e, args: _expanded(rebuild(e, tuple(args)))
    )
    assert not any(e.op is INDEX and e.dtype is I64 for e in nodes_of(made))
    (found,) = evaluate_exprs(
        (made,), {number: torch.arange(count)}, values.__getitem__, lambda *_: pytest.fail("a load")
    )
    wanted = {"seed": values["seed"], "place": values["start"] + torch.arange(count)}
    torch.testing.assert_close(
        found, evaluate(ops.rand_bits(SEED, PLACE, 3), wanted), rtol=0, atol=0
    )


def _expanded(e: Expr) -> Expr:
    return e.op.expand(*e.args, *e.attrs) if e.op is RAND_BITS and e.op.expand else e


def test_bits_are_independent_of_each_other() -> None:
    bits = evaluate(ops.rand_bits(SEED, PLACE, 0), VALUES).numpy()
    ones = np.unpackbits(bits.view(np.uint8)).reshape(N, 32).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(N)
    assert len(np.unique(bits)) > N - 60  # about N^2 / 2^33 = 4.7 collisions


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_uniform_numbers(dtype: DType) -> None:
    u = evaluate(ops.uniform(SEED, START, PLACE, dtype), VALUES)
    assert u.dtype is dtype.torch and u.min() >= 0 and u.max() < 1
    # The greatest distance of the empirical distribution (Kolmogorov and Smirnov), at 1e-6.
    order = u.double().sort().values
    distance = (order - torch.arange(N) / N).abs().max()
    assert distance < 2.69 / np.sqrt(N)
    pairs = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]
    assert abs(pairs) < 5 / np.sqrt(N)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_normal_numbers(dtype: DType) -> None:
    z = evaluate(ops.normal(SEED, START, PLACE, dtype), VALUES)
    assert z.dtype is dtype.torch and torch.isfinite(z).all()
    order = z.double().sort().values
    distance = (torch.special.ndtr(order) - torch.arange(N) / N).abs().max()
    assert distance < 2.69 / np.sqrt(N)
    assert 3.9 < z.abs().max() < 7


def test_whole_numbers_below_a_limit() -> None:
    values = {k: v[:60_000] for k, v in VALUES.items()}
    drawn = evaluate(ops.random_below(SEED, START, PLACE, const(6, I64)), values)
    counts = torch.bincount(drawn, minlength=6)
    assert len(counts) == 6
    assert ((counts - 10_000).abs() < 5 * 92).all()  # sqrt(60000 * 5/36) = 91.3
    wide = evaluate(ops.random_below(SEED, START, PLACE, const(2**32, I64)), values)
    assert wide.min() >= 0 and wide.max() < 2**32 and wide.max() > 2**31


@pytest.mark.parametrize("of", (ops.uniform, ops.normal), ids=("uniform", "normal"))
def test_neighbours_with_one_counter_have_nothing_to_do_with_each_other(
    of: Callable[..., Expr],
) -> None:
    values = {"seed": torch.tensor([77]), "start": torch.tensor([2**32 - 20_000])}
    numbers = torch.arange(N).to(torch.uint32)
    x = evaluate(
        of(SEED, ref("start", I64), ops.cast(ref("n", U32), I64)), {**values, "n": numbers}
    )
    u = torch.special.ndtr(x.double()) if of is ops.normal else x.double()
    assert x.isfinite().all()
    places = torch.arange(N // 2) / (N // 2)
    for half in (u[::2], u[1::2]):
        assert (half.sort().values - places).abs().max() < 2.69 / np.sqrt(N // 2)
    # In themselves, in their squares, and in cells of 100: chi^2 has 99 degrees of freedom.
    for a, b in ((u[::2], u[1::2]), ((u[::2] - 0.5).square(), (u[1::2] - 0.5).square())):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / np.sqrt(N // 2)
    cells = (u * 10).long().clamp(max=9)
    counts, each = torch.bincount(10 * cells[::2] + cells[1::2], minlength=100), N / 200
    assert abs(((counts - each).square() / each).sum() - 99) < 5 * np.sqrt(198)
