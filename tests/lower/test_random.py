"""Random ops: distribution, shape, type; the numbers themselves are fixed by the seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lenz.frontend.refusals import is_refused
from lenz.ir.graph import Extern
from lenz.lower.builder import Decline, GraphBuilder
from lenz.lower.random import check_own
from tests.lower.harness import evaluated

X = torch.full((60, 100), 0.25)
Fn = Callable[[torch.Tensor], Any]

# name -> function, mean, standard deviation, least, greatest (None: no bound)
DRAWS: dict[str, tuple[Fn, float, float, float | None, float | None]] = {
    "rand": (lambda x: torch.rand(60, 100), 0.5, 12**-0.5, 0.0, 1.0),
    "rand_like": (lambda x: torch.rand_like(x), 0.5, 12**-0.5, 0.0, 1.0),
    "randn": (lambda x: torch.randn(60, 100), 0.0, 1.0, None, None),
    "randn_like": (lambda x: torch.randn_like(x), 0.0, 1.0, None, None),
    "randint": (lambda x: torch.randint(5, (60, 100)), 2.0, 2**0.5, 0, 5),
    "randint_low": (lambda x: torch.randint(-3, 4, (60, 100)), 0.0, 2.0, -3, 4),
    "randint_like": (lambda x: torch.randint_like(x, 5), 2.0, 2**0.5, 0, 5),
    "randint_like_low": (lambda x: torch.randint_like(x, -3, 4), 0.0, 2.0, -3, 4),
    "uniform": (lambda x: x.clone().uniform_(2, 6), 4.0, 4 * 12**-0.5, 2.0, 6.0),
    "normal": (lambda x: x.clone().normal_(3, 0.5), 3.0, 0.5, None, None),
    "normal_tensor": (lambda x: torch.normal(x, x), 0.25, 0.25, None, None),
    "normal_float": (lambda x: torch.normal(1.5, x), 1.5, 0.25, None, None),
    "exponential": (lambda x: x.clone().exponential_(2.0), 0.5, 0.5, 0.0, None),
    "bernoulli": (lambda x: torch.bernoulli(x), 0.25, 0.1875**0.5, 0.0, 1.01),
    "bernoulli_p": (lambda x: torch.bernoulli(x, 0.25), 0.25, 0.1875**0.5, 0.0, 1.01),
    "bernoulli_into": (lambda x: x.clone().bernoulli_(0.25), 0.25, 0.1875**0.5, 0.0, 1.01),
}


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", DRAWS)
def test_distribution(name: str, dynamic: bool) -> None:
    fn, mean, deviation, low, high = DRAWS[name]
    g, (out,) = evaluated(fn, X, dynamic=dynamic)
    assert [n.op for n in g.nodes if isinstance(n, Extern)] == ["lenz.seed"]
    want = fn(X)
    assert out.shape == want.shape
    assert out.dtype is want.dtype
    assert out.stride() == want.stride()
    # Five standard errors: the seed is fixed, so the outcome is too.
    error = 5 * deviation / math.sqrt(out.numel())
    assert abs(out.double().mean().item() - mean) < error
    assert abs(out.double().std().item() - deviation) < 0.05 * deviation + error
    assert low is None or out.min().item() >= low
    assert high is None or out.max().item() < high


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_types(dtype: torch.dtype) -> None:
    for fn in (torch.rand_like, torch.randn_like, torch.bernoulli):
        _, (out,) = evaluated(fn, X.to(dtype))
        assert out.dtype is dtype
    _, (out,) = evaluated(torch.rand_like, X.to(dtype))
    assert out.max().item() < 1.0


def test_each_op_draws_its_own_seed() -> None:
    g, _ = evaluated(lambda x: (torch.rand_like(x), torch.rand_like(x)), X)
    assert len([n for n in g.nodes if isinstance(n, Extern)]) == 2


@pytest.mark.parametrize("p", (0.0, 0.3, 1.0))
def test_native_dropout(p: float) -> None:
    _, (out, mask) = evaluated(lambda x: torch.native_dropout(x, p, True), X)
    assert mask.dtype is torch.bool
    assert abs(mask.double().mean().item() - (1 - p)) < 5 * 0.5 / math.sqrt(X.numel())
    wanted = X * mask * (1 / (1 - p) if p < 1 else 0.0)
    torch.testing.assert_close(out, wanted)


def test_native_dropout_in_evaluation() -> None:
    g, (out, mask) = evaluated(lambda x: torch.native_dropout(x, 0.5, False), X)
    assert torch.equal(out, X)
    assert bool(mask.all())
    assert not any(isinstance(n, Extern) for n in g.nodes)


def test_dropout_of_a_module() -> None:
    _, (out,) = evaluated(lambda x: torch.nn.functional.dropout(x, 0.4, training=True), X)
    kept = out != 0
    torch.testing.assert_close(out[kept], X[kept] / 0.6)
    assert abs(kept.double().mean().item() - 0.6) < 0.04


def test_a_generator_of_the_caller_stays_eager() -> None:
    b = GraphBuilder()
    with pytest.raises(Decline, match="a generator of the caller"):
        check_own(b, torch.Generator())
    check_own(b, None)


@pytest.mark.parametrize(
    "draw",
    (
        lambda x: x.uniform_(-3e38, 3e38),
        lambda x: x.uniform_(0, math.inf),
        lambda x: x.half().uniform_(-6e4, 6e4),
        lambda x: x.double().uniform_(-1e308, 1e308),
        lambda x: torch.randint(257, (9,), dtype=torch.uint8),
        lambda x: torch.randint(-5, 5, (9,), dtype=torch.uint8),
        lambda x: torch.randint(0, 5, (9,), dtype=torch.bool),
        lambda x: torch.randint_like(x.half(), 70000),
        lambda x: torch.native_dropout(x, math.nan, True),
        lambda x: torch.native_dropout(x, 2.0, True),
    ),
)
def test_ranges_that_eager_rejects(draw: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"uniform_ expects|out of bounds|to be in \[0, 1\]"):
        torch.compile(draw, backend="lenz")(torch.ones(4))


def test_ranges_as_wide_as_their_types_are_drawn() -> None:
    assert not is_refused("randint", (0, 256, [9]), {"dtype": torch.uint8})
    assert not is_refused("randint_like", (torch.ones(2, dtype=torch.int8), -128, 128), {})
    assert not is_refused("uniform", (torch.ones(2), -1e38, 2e38), {})
