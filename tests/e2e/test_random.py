"""Random numbers of compiled programs: seeds, states, recomputation, distributions, eager's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

Fn = Callable[..., Any]
X = torch.rand(64, 50, generator=torch.Generator().manual_seed(0))


def through(fn: Fn, **options: Any) -> Fn:
    torch._dynamo.reset()
    return torch.compile(fn, backend="lenz", options=options or None)


def equal(a: Any, b: Any) -> bool:
    pairs = zip(_pytree.tree_leaves(a), _pytree.tree_leaves(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: (torch.rand(7, 9), torch.randn(33), torch.rand_like(x), torch.randn_like(x)),
    "other types": lambda x: (torch.randn(40, dtype=torch.bfloat16), torch.rand(9).double()),
    "randint": lambda x: (torch.randint(9, (40,)), torch.randint_like(x, -3, 7)),
    "randperm": lambda x: torch.randperm(20),
    "normal": lambda x: (torch.normal(x, x), x.clone().normal_(1, 2)),
    "in place": lambda x: (x.clone().uniform_(1, 2), x.clone().exponential_(), x.half().normal_()),
    "bernoulli": lambda x: (torch.bernoulli(x), x.clone().bernoulli_(0.3), x.clone().bernoulli_(x)),
    "rarer": lambda x: (x.clone().cauchy_(), x.clone().geometric_(0.3), x.clone().log_normal_()),
    "integers in place": lambda x: (x.clone().random_(5), x.long().random_()),
    "dropout": lambda x: (F.dropout(x, 0.3), F.dropout2d(x.view(8, 8, 50, 1), 0.3)),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "multinomial": lambda x: (torch.multinomial(x, 3), torch.multinomial(x, 60, True)),
    "poisson": lambda x: (torch.poisson(x * 9), torch.binomial(x * 0 + 10, x)),
    "beside kernels": lambda x: ((torch.rand_like(x) + x).relu(), F.dropout(x + 1, 0.5) * 2),
}


@pytest.mark.parametrize("name", DRAWS)
def test_eager_random_is_eager_s_to_the_bit(name: str) -> None:
    fn = DRAWS[name]
    run = through(fn, eager_random=True)
    torch.manual_seed(5)
    want, after = [fn(X) for _ in range(2)], torch.get_rng_state()
    torch.manual_seed(5)
    got = [run(X) for _ in range(2)]
    assert equal(got, want) and torch.equal(torch.get_rng_state(), after)


def test_eager_s_draws_keep_their_order_where_kernels_move() -> None:
    """The kernel before the first draw joins one behind the second, and may not take it along."""

    def fn(x: Tensor, w: Tensor) -> Any:
        first = torch.bernoulli((x * 2).sigmoid() * 0.5)
        product = torch.rand(50, 50) @ w
        return first, (x * 2 + 1).exp() * product, x * 2 * product

    x, w = X[:50], X[14:]
    torch.manual_seed(5)
    want = fn(x, w)
    torch.manual_seed(5)
    got = through(fn, eager_random=True)(x, w)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1:], want[1:])


def test_a_draw_that_only_gives_a_shape_is_drawn() -> None:
    def fn() -> Tensor:
        return torch.randn_like(torch.rand(5))

    run = through(fn, eager_random=True)
    torch.manual_seed(3)
    want = fn()
    torch.manual_seed(3)
    assert torch.equal(run(), want)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_gives_the_same_numbers_and_calls_give_others(name: str) -> None:
    run = through(DRAWS[name])
    torch.manual_seed(5)
    first, second = run(X), run(X)
    torch.manual_seed(5)
    assert equal(run(X), first) and equal(run(X), second)
    leaves = zip(_pytree.tree_leaves(first), _pytree.tree_leaves(second), strict=True)
    assert not any(torch.equal(a, b) for a, b in leaves), "the seed does not advance"


def test_states_are_taken_and_given_back() -> None:
    run = through(lambda x: F.dropout(x, 0.5) + torch.randn_like(x))
    run(X)
    state = torch.get_rng_state()
    first = run(X)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        inside = run(X)
    second = run(X)
    torch.set_rng_state(state)
    assert torch.equal(run(X), first) and torch.equal(run(X), second)
    assert not torch.equal(inside, first) and not torch.equal(first, second)


def test_a_generator_of_the_caller_is_drawn_from() -> None:
    g = torch.Generator()

    def fn(x: Tensor) -> Tensor:
        return torch.rand(64, 50, generator=g) + x

    run = through(fn)
    before = torch.get_rng_state()
    g.manual_seed(7)
    want = fn(X)
    g.manual_seed(7)
    assert torch.equal(run(X), want)
    assert torch.equal(torch.get_rng_state(), before), "the default generator was drawn from"


@pytest.mark.parametrize("reentrant", (False, True), ids=("hooks", "reentrant"))
@pytest.mark.parametrize("eager_random", (False, True), ids=("philox", "eager"))
def test_what_is_computed_again_for_gradients_draws_the_same(
    eager_random: bool, reentrant: bool
) -> None:
    def block(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.5).exp() * (1 + torch.rand_like(x)), 0.5)

    def fn(x: Tensor) -> Tensor:
        made: Tensor = checkpoint(block, x, use_reentrant=reentrant)
        return made * 3

    torch.manual_seed(4)
    x = torch.zeros(4000, requires_grad=True)
    y = through(fn, eager_random=eager_random)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    # Where the first dropout keeps x, its factor is 2, and y = c exp(2x) has y' = 2 y; else y' = 0.
    slope = dx[y != 0] / y.detach()[y != 0]
    kept = slope > 1
    torch.testing.assert_close(slope, 2.0 * kept)
    assert 0.4 < kept.double().mean() < 0.6 and 0.4 < (y != 0).double().mean() < 0.6
    assert bool((dx[y == 0] == 0).all()), "the gradient has another mask than the result"


def test_dropout_has_one_mask_in_both_directions() -> None:
    x = torch.ones(3, 5000, requires_grad=True)
    y = through(lambda x: F.dropout(x * 2, 0.25).relu())(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, y.detach())


N = 200_000
# name -> draw, cumulative distribution (of a number of f64)
CONTINUOUS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "rand": (lambda: torch.rand(N), lambda x: x),
    "rand f64": (lambda: torch.rand(N, dtype=torch.float64), lambda x: x),
    "uniform_": (lambda: torch.empty(N).uniform_(-3, 5), lambda x: (x + 3) / 8),
    "randn": (lambda: torch.randn(N), torch.special.ndtr),
    "normal": (lambda: torch.normal(2.0, 3.0, (N,)), lambda x: torch.special.ndtr((x - 2) / 3)),
    "normal_": (lambda: torch.empty(N).normal_(-1, 0.1), lambda x: torch.special.ndtr(10 * x + 10)),
    "exponential_": (lambda: torch.empty(N).exponential_(2), lambda x: 1 - torch.exp(-2 * x)),
    "cauchy_": (lambda: torch.empty(N).cauchy_(), lambda x: x.atan() / math.pi + 0.5),
    "log_normal_": (
        lambda: torch.empty(N).log_normal_(),
        lambda x: torch.special.ndtr((x.log() - 1) / 2),
    ),
    "rrelu": (lambda: -F.rrelu(-torch.ones(N), 0.1, 0.3, True), lambda x: (x - 0.1) / 0.2),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_distributions(name: str) -> None:
    """Of the greatest distance d that Kolmogorov and Smirnov test: P(d > 2.69 / sqrt(N)) = 1e-6."""
    draw, cdf = CONTINUOUS[name]
    torch.manual_seed(11)
    x = through(draw)().double()
    below = cdf(x.sort().values)
    places = torch.arange(N, dtype=torch.float64)
    distance = torch.maximum((places + 1) / N - below, below - places / N).max()
    assert distance < 2.69 / math.sqrt(N)
    ranks = cdf(x)
    lag = torch.corrcoef(torch.stack([ranks[:-1], ranks[1:]]))[0, 1]
    assert abs(lag) < 5 / math.sqrt(N), "a number tells about the next"


COUNTED: dict[str, tuple[Callable[[], Tensor], list[float]]] = {
    "randint": (lambda: torch.randint(7, (N,)), [1 / 7] * 7),
    "randint_low": (lambda: torch.randint(-2, 3, (N,)) + 2, [0.2] * 5),
    "random_": (lambda: torch.empty(N).random_(5), [0.2] * 5),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), [0.7, 0.3]),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.9), [0.1, 0.9]),
    "dropout": (lambda: F.dropout(torch.ones(N), 0.2) * 0.8, [0.2, 0.8]),
    "geometric_": (
        lambda: torch.empty(N).geometric_(0.5).clamp(max=4) - 1, [0.5, 0.25, 0.125, 0.125],
    ),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([1.0, 2.0, 5.0]), N, True), [0.125, 0.25, 0.625],
    ),
    "first of randperm": (
        lambda: torch.stack([torch.randperm(3) for _ in range(200)])[:, 0], [1 / 3] * 3,
    ),
}  # fmt: skip


def test_multinomial_draws_no_place_twice_and_refuses_what_eager_refuses() -> None:
    chances = torch.tensor([[1.0, 2, 0, 5, 2], [3, 0, 0, 0, 1]])
    rows = through(lambda p: torch.multinomial(p.repeat(20_000, 1), 2))(chances).view(-1, 2, 2)
    assert (rows[..., 0] != rows[..., 1]).all()
    assert set(rows[:, 1].flatten().tolist()) == {0, 4}, "what has no chance is not drawn"
    # P(first 3, then 1) = 5/10 2/5, and so on; five standard deviations.
    for first, then, chance in ((3, 1, 0.2), (1, 3, 0.125), (0, 4, 1 / 10 * 2 / 9)):
        hits = ((rows[:, 0, 0] == first) & (rows[:, 0, 1] == then)).double().mean().item()
        assert abs(hits - chance) < 5 * (chance * (1 - chance) / 20_000) ** 0.5
    for count in (1, 2):
        run = through(lambda p, n=count: torch.multinomial(p, n))
        for bad in ([1.0, -1.0, 2.0], [math.inf, 1.0, 1.0], [math.nan, 1.0, 1.0], [0.0, 0.0, 0.0]):
            with pytest.raises(RuntimeError, match="probability"):
                run(torch.tensor(bad))
        assert run(torch.rand(3, 40).half()).dtype is torch.int64
    with pytest.raises(RuntimeError, match="cannot sample n_sample"):
        through(lambda p: torch.multinomial(p, 9))(chances)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("name", COUNTED)
def test_counts(name: str) -> None:
    """Each count is binomial: five standard deviations are one chance in two million."""
    draw, chances = COUNTED[name]
    torch.manual_seed(12)
    drawn = through(draw)().round().long()
    counts = torch.bincount(drawn, minlength=len(chances))
    assert len(counts) == len(chances)
    for count, p in zip(counts.tolist(), chances, strict=True):
        assert abs(count - p * len(drawn)) < 5 * math.sqrt(len(drawn) * p * (1 - p))
