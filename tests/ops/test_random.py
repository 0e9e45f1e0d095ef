"""Philox against the published answers, and the statistics of what is made of its bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lanes import Lanes
from test_forms import emit, evaluate

from lenz import ops
from lenz.ir.dtype import F32, F64, I64, U32, DType
from lenz.ir.expr import const, ref
from lenz.ops.random import philox, philox_reference

# counter, key, result: the known answers of the Random123 library for philox4x32, 10 rounds.
ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert tuple(int(w) for w in philox_reference(counter, key)) == answer
    a, b, c, d = (const(v, U32) for v in counter)
    words = philox((a, b, c, d), (const(key[0], U32), const(key[1], U32)))
    assert tuple(w.attrs[0] for w in words) == answer


N = 200_000
SEED, PLACE = ref("seed", I64), ref("place", I64)
VALUES = {"seed": torch.full((N,), -1234567890123), "place": torch.arange(N) + 2**33 - 1000}


def test_the_expansion_gives_the_bits_of_the_reference() -> None:
    values = {k: v[:3000] for k, v in VALUES.items()}
    for word in range(4):
        made = ops.rand_bits(SEED, PLACE, word)
        want = evaluate(made, values)
        torch.testing.assert_close(emit(made, values, Lanes(3000)), want, rtol=0, atol=0)


def test_bits_are_independent_of_each_other() -> None:
    bits = evaluate(ops.rand_bits(SEED, PLACE, 0), VALUES).numpy()
    ones = np.unpackbits(bits.view(np.uint8)).reshape(N, 32).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(N)
    assert len(np.unique(bits)) > N - 60  # about N^2 / 2^33 = 4.7 collisions


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_uniform_numbers(dtype: DType) -> None:
    u = evaluate(ops.uniform(SEED, PLACE, dtype), VALUES)
    assert u.dtype is dtype.torch and u.min() >= 0 and u.max() < 1
    # The greatest distance of the empirical distribution (Kolmogorov and Smirnov), at 1e-6.
    order = u.double().sort().values
    distance = (order - torch.arange(N) / N).abs().max()
    assert distance < 2.69 / np.sqrt(N)
    pairs = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]
    assert abs(pairs) < 5 / np.sqrt(N)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_normal_numbers(dtype: DType) -> None:
    z = evaluate(ops.normal(SEED, PLACE, dtype), VALUES)
    assert z.dtype is dtype.torch and torch.isfinite(z).all()
    order = z.double().sort().values
    distance = (torch.special.ndtr(order) - torch.arange(N) / N).abs().max()
    assert distance < 2.69 / np.sqrt(N)
    assert 3.9 < z.abs().max() < 7


def test_whole_numbers_below_a_limit() -> None:
    values = {k: v[:60_000] for k, v in VALUES.items()}
    drawn = evaluate(ops.random_below(SEED, PLACE, const(6, I64)), values)
    counts = torch.bincount(drawn, minlength=6)
    assert len(counts) == 6
    assert ((counts - 10_000).abs() < 5 * 92).all()  # sqrt(60000 * 5/36) = 91.3
    wide = evaluate(ops.random_below(SEED, PLACE, const(2**32, I64)), values)
    assert wide.min() >= 0 and wide.max() < 2**32 and wide.max() > 2**31
