"""The score and mask functions of the public examples of `flex_attention`, beside eager.

All of one group are calls of one function, so that tracing is paid once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)

B, H, D = 2, 4, 8
MOST = 48  # the longest sequence

Score: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Mask: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

torch.manual_seed(0)
BIAS = torch.randn(2 * MOST)
SQUARE = torch.randn(MOST, MOST)
OF_HEADS = torch.randn(H)
OF_BATCH = torch.randn(B, H)
SLOPES = torch.exp2(-torch.arange(1, H + 1) * 8.0 / H)
DOCUMENT = torch.arange(MOST) // 7
PREFIX = torch.tensor([3, 9])
LENGTHS = torch.tensor([11, 20])
CAP, SLOPE, WINDOW, WIDTH = 20.0, 0.01, 5, 6


def neighbours(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """NATTEN: both positions are of a picture of WIDTH columns, at most 2 apart."""
    x, y, u, v = i // WIDTH, i % WIDTH, j // WIDTH, j % WIDTH
    mid = x.clamp(1, 3)
    return ((mid - u).abs() <= 2) & ((y - v).abs() <= 2)


def polynomial(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s**2 * 0.5 - s / 3 + 2**-3 * (i % 4) + (j >> 1) * 1e-3 + (i // 3 == 2) * 0.25


SCORES: dict[str, Score] = {
    "noop": lambda s, b, h, i, j: s,
    "a number": lambda s, b, h, i, j: s * 2.0,
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
    "relative": lambda s, b, h, i, j: s + (i - j),
    "relative, a float": lambda s, b, h, i, j: s + (i - j) * 0.01,
    "a float of the module": lambda s, b, h, i, j: s + (i - j) * SLOPE,
    "alibi by exp2": lambda s, b, h, i, j: s - torch.exp2(-(h + 1) * 8.0 / H) * (i - j),
    "alibi by a table": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "soft cap": lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0),
    "tanh soft cap": lambda s, b, h, i, j: CAP * (s * (1 / CAP)).tanh(),
    "of heads": lambda s, b, h, i, j: s * OF_HEADS[h] + OF_BATCH[b, h],
    "relative bias": lambda s, b, h, i, j: s + BIAS[i - j + MOST],
    "bias": lambda s, b, h, i, j: s + SQUARE[i, j],
    "natten": lambda s, b, h, i, j: torch.where(neighbours(b, h, i, j), s, -float("inf")),
    "padding": lambda s, b, h, i, j: torch.where(j < LENGTHS[b], s, -1e9),
    "checkerboard": lambda s, b, h, i, j: torch.where((i - j).abs() % 2 == 1, s * 0.5, s),
    "polynomial": polynomial,
    "distance": lambda s, b, h, i, j: s - torch.log1p((i - j).abs().float()) * math.sqrt(0.5),
    "sigmoid": lambda s, b, h, i, j: s * torch.sigmoid(s) + torch.minimum(i, j) * 0.125,
}


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def prefix(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= PREFIX[b]


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i - j <= WINDOW


def document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return DOCUMENT[i] == DOCUMENT[j]


def dilated(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i - j).abs() <= 8) & ((i - j) % 2 == 0)


def transformer(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A stand-alone self-attention of a picture: a window in each of two directions."""
    return ((i % WIDTH - j % WIDTH).abs() <= 1) & ((i // WIDTH - j // WIDTH).abs() <= 1)


def per_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Causal in each document, by positions that start anew."""
    first = DOCUMENT[i] * 7
    return (DOCUMENT[i] == DOCUMENT[j]) & (i - first >= j - first)


MASKS: dict[str, Mask] = {
    "causal": causal,
    "sliding window": and_masks(causal, window),
    "prefix": or_masks(prefix, causal),
    "document": and_masks(document, causal),
    "per document": per_document,
    "natten": neighbours,
    "dilated": dilated,
    "stand-alone": transformer,
    "of heads": lambda b, h, i, j: (i >= j) & (i - j < 4 * (h + 1)),
    "nothing for some": lambda b, h, i, j: (i > 3) & (j < i),
}


@pytest.fixture(autouse=True)
def gradients_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses gradients of it on CPUs, of which lenz knows nothing."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


def inputs(n: int, heads: int = H, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(n)
    shapes = (H, heads, heads)
    return [torch.randn(B, n, h, D, dtype=dtype).transpose(1, 2).requires_grad_() for h in shapes]


def step(fn: Callable[..., Any], *args: Any) -> list[Tensor]:
    """The results, and the gradients of what wants one."""
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    got = [t for t in torch.utils._pytree.tree_leaves(fn(*args)) if t is not None]
    loss = sum((t.nan_to_num(neginf=0).sin() * k).sum() for k, t in enumerate(got, 1))
    return [*got, *torch.autograd.grad(loss, leaves)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def agree(fn: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> None:
    """Each call's results and gradients are eager's."""
    torch._dynamo.reset()
    run = torch.compile(fn, backend="lenz", fullgraph=True, **options)
    got = [step(run, *args) for args in calls]
    torch._dynamo.reset()
    for args, ours in zip(calls, got, strict=True):
        for a, b in zip(ours, step(fn, *args), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, equal_nan=True)
            assert a.stride() == b.stride()


def parts(names: Any, count: int) -> list[list[str]]:
    names = list(names)
    return [names[k : k + count] for k in range(0, len(names), count)]


def scored(names: Iterable[str]) -> Callable[..., list[Any]]:
    scores = [SCORES[name] for name in names]
    return lambda q, k, v: [flex_attention(q, k, v, score_mod=f) for f in scores]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("names", parts(SCORES, 3), ids=",".join)
def test_scores(names: list[str]) -> None:
    agree(scored(names), tuple(inputs(24)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "names",
    [("relative, a float", "relative bias"), ("alibi by a table", "natten", "polynomial")],
    ids=",".join,
)
def test_scores_of_other_lengths(names: tuple[str, ...]) -> None:
    agree(scored(names), tuple(inputs(30)), tuple(inputs(41)), dynamic=True)


def test_a_captured_float_with_other_lengths() -> None:
    """It is a constant of the graph.  torch itself cannot trace a training step of it."""

    def fn(q: Tensor, slope: float) -> Tensor:
        made = flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j) * slope)
        assert isinstance(made, Tensor)
        return made

    run = torch.compile(fn, backend="lenz", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n, slope in ((30, 0.01), (41, 0.01), (30, -0.5)):
            q = inputs(n)[0]
            torch.testing.assert_close(run(q, slope), fn(q, slope), rtol=2e-5, atol=2e-5)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("names", parts(MASKS, 2), ids=",".join)
def test_masks(names: list[str]) -> None:
    """Of a block mask, with the log-sum-exp; also for other lengths."""

    def fn(q: Tensor, k: Tensor, v: Tensor, masks: list[Any]) -> list[Any]:
        aux = AuxRequest(lse=True)
        return [flex_attention(q, k, v, block_mask=m, return_aux=aux) for m in masks]

    def call(n: int) -> tuple[Any, ...]:
        return *inputs(n), [create_block_mask(MASKS[m], B, H, n, n, device="cpu") for m in names]

    agree(fn, call(30), call(41), dynamic=True)


def test_a_mask_made_inside_of_the_compiled_function() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Any:
        block = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device="cpu")
        return flex_attention(q, k, v, SCORES["alibi by a table"], block, scale=0.5)

    agree(fn, tuple(inputs(30)))


def test_fewer_heads_of_keys_a_scale_and_a_bias_that_is_learned() -> None:
    bias, table = torch.randn(H, MOST, requires_grad=True), torch.randn(H, requires_grad=True)

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, table: Tensor) -> Any:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return 20.0 * torch.tanh(s / 20.0) * table[h] + bias[h, i - j] + SLOPES[h] * (i - j)

        aux = AuxRequest(lse=True)
        return flex_attention(q, k, v, score, scale=0.3, enable_gqa=True, return_aux=aux)

    agree(fn, (*inputs(24, heads=2), bias, table))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    """A number is rounded as eager rounds it; in half types to one unit of the last place."""
    f = scored(("relative, a float", "alibi by exp2", "soft cap"))
    with torch.no_grad():
        args = inputs(24, dtype=dtype)
        got = torch.compile(f, backend="lenz", fullgraph=True)(*args)
        torch._dynamo.reset()
        tol = 2**-7 if dtype is torch.bfloat16 else 1e-12
        torch.testing.assert_close(got, f(*args), rtol=tol, atol=tol)
