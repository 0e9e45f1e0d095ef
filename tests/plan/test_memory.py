"""Which results may lie in the memory of an argument that dies with the launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import lenz
import lenz.ops  # the reader finds ops by name
from lenz.ir.dtype import F32
from lenz.ir.kernel import Kernel
from lenz.ir.plan import Alloc, Free, Reuse
from lenz.ir.reader import read
from lenz.ir.tensor import TensorType, contiguous
from lenz.plan.memory import free_holds, may_overwrite

HEAD = "kernel @k {kind} (%a: in f32[64], %b: in f32[64], %y: out f32[64]) {{\n{body}\n}}"
ELEMENT = "for i in 64 : vector { store(%y, [i], add(load(%a, [i]), load(%b, [-i + 63]))) }"
ROWS = """
for i in 8 : parallel {
  for r in 8 : vector { m = reduce max { load(%a, [8*i + r]) } over r }
  for r in 8 : vector { store(%y, [8*i + r], sub(load(%a, [8*i + r]), m)) }
}"""
ROWS_IN_PARTS = """
for i in 2 : parallel {
  for j in 4 : seq {
    for r in min(10, -10*j + 32) : vector { m = reduce max { load(%a, [32*i + r + 10*j]) } over r }
    n = reduce max { m } over j
  }
  for r in 32 : vector { store(%y, [32*i + r], sub(load(%a, [32*i + r]), n)) }
}"""
NEXT_ROWS = ROWS_IN_PARTS.replace("min(10, -10*j + 32)", "min(10, -10*j + 33)")
ROWS_OF_OTHERS = ROWS_IN_PARTS.replace("load(%a, [32*i + r + 10*j])", "load(%a, [r + 10*j])")
GAPS = """
for i in 2 : parallel {
  for r in 32 : vector { m = reduce max { load(%a, [i + r]) } over r }
  for r in 32 : vector { store(%y, [i + 2*r], m) }
}"""
REVERSED = """
for i in 2 : parallel {
  for r in 32 : vector {
    m = load(%a, [32*i + 31 - r])
    store(%y, [32*i + r], m)
  }
}"""
ONE_VALUE = """
t = load(%a, [3])
for r in 64 : parallel { store(%y, [r], t) }"""
A_VALUE_PER_ROW = """
for i in 2 : parallel {
  t = load(%a, [32*i + 3])
  for r in 32 : vector { store(%y, [32*i + r], t) }
}"""
READ_LATER = """
for i in 8 : parallel {
  for r in 8 : vector { store(%y, [8*i + r], load(%a, [8*i + r])) }
  for r in 8 : vector { m = reduce max { load(%a, [8*i + r]) } over r }
}"""
BRANCHES = """
for b in 8 : grid {
  if b < 1 {
    for k in 8 : lane { store(%y, [8*b + k], load(%a, [8*b + k])) }
  } else {
    for k in 8 : lane { store(%y, [8*b + k], add(load(%a, [8*b + k]), load(%b, [8*b]))) }
  }
}"""
ONE_AFTER_THE_OTHER = BRANCHES.replace("} else {", "} if b < 2 {")
REVISITED = "for s in 2 : seq { for i in 64 : vector { store(%y, [i], load(%a, [i])) } }"


@pytest.mark.diagonal(2)
@pytest.mark.parametrize(
    ("body", "kind", "overwrites_a", "overwrites_b"),
    [
        (ELEMENT, "pointwise", True, False),
        (ELEMENT, "transpose", False, False),
        (ROWS, "reduction", True, True),
        (ROWS_IN_PARTS, "reduction", True, True),
        (NEXT_ROWS, "reduction", False, True),
        (ROWS_OF_OTHERS, "reduction", False, True),
        (GAPS, "reduction", False, True),
        (REVERSED, "pointwise", False, True),
        (ONE_VALUE, "pointwise", False, True),
        (A_VALUE_PER_ROW, "pointwise", False, True),
        (READ_LATER, "reduction", False, True),
        (REVISITED, "pointwise", False, False),
        (BRANCHES, "pointwise", True, False),
        (ONE_AFTER_THE_OTHER, "pointwise", False, False),
    ],
)
def test_only_what_was_read_before_is_overwritten(
    body: str, kind: str, overwrites_a: bool, overwrites_b: bool
) -> None:
    k = read(HEAD.format(kind=kind, body=body))
    assert isinstance(k, Kernel)
    assert may_overwrite(k, "a", "y") == overwrites_a
    assert may_overwrite(k, "b", "y") == overwrites_b


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scores die in the softmax, which is as large as they are."""
    return F.softmax(q @ k.t(), -1) @ v


@pytest.mark.parametrize("length", [300, 5000])  # a row at once, and in parts of 1024
def test_a_result_takes_the_memory_of_an_argument_that_dies(length: int) -> None:
    q, k, v = torch.randn(300, 16), torch.randn(length, 16), torch.randn(length, 16)
    report = lenz.explain(attention)(q, k, v)
    torch.testing.assert_close(report.result, attention(q, k, v))
    large = [a for a in report.allocs if a.nbytes == 4 * 300 * length]
    assert len(large) == 2
    assert large[1].reused_from == large[0].name


def test_an_argument_of_the_caller_is_never_taken() -> None:
    x = torch.randn(300, 300)
    kept = x.clone()
    report = lenz.explain(lambda x: F.softmax(x, -1))(x)
    torch.testing.assert_close(report.result, F.softmax(kept, -1))
    assert torch.equal(x, kept)
    assert [a.reused_from for a in report.allocs] == [None]


def test_what_is_read_again_is_not_taken() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return (F.softmax(y, -1) @ w) + y

    x, w = torch.randn(64, 64), torch.randn(64, 64)
    torch.testing.assert_close(torch.compile(f, backend="lenz")(x, w), f(x, w))


def hourglass(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Products of 64, 256, 192 and 64 columns: 16, 64, 48 and 16 KiB, each with a kernel."""
    for w in weights:
        x = torch.relu(x @ w)
    return x


@pytest.mark.parametrize("dynamic", [False, True])
def test_dead_memory_is_not_held_at_the_peak(dynamic: bool) -> None:
    """The first product is dead at the peak, though a later one of its size could take it."""
    x, sizes = torch.randn(64, 32), (32, 64, 256, 192, 64)
    weights = [torch.randn(n, m) for n, m in itertools.pairwise(sizes)]
    report = lenz.explain(hourglass, dynamic=dynamic)(x, *weights)
    torch.testing.assert_close(report.result, hourglass(x, *weights))
    (graph,) = report.graphs
    assert graph.peak == 4 * 64 * (256 + 192)


def test_dead_memory_is_held_below_the_peak() -> None:
    x, sizes = torch.randn(64, 32), (32, 64, 16, 64, 256, 192)
    weights = [torch.randn(n, m) for n, m in itertools.pairwise(sizes)]
    report = lenz.explain(hourglass)(x, *weights)
    torch.testing.assert_close(report.result, hourglass(x, *weights))
    wide = [a for a in report.allocs if a.nbytes == 4 * 64 * 64 and a.reused_from is None]
    assert len(wide) == 1


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=40))
def test_no_hold_raises_the_peak(made: list[tuple[int, int]]) -> None:
    """Buffers of three sizes live for some steps: the peak is as low as if none were reused."""
    sizes = {f"b{k}": size for k, (size, _) in enumerate(made)}
    ends: dict[int, list[str]] = {}
    for k, (_, lasts) in enumerate(made):
        ends.setdefault(k + lasts, []).append(f"b{k}")
    steps, holds, dead = list[Any](), dict[int, tuple[int, str]](), list[tuple[str, int]]()
    kind = TensorType(F32, "cpu", contiguous(()))
    for k in range(len(made) + 13):
        if k < len(made):
            name = f"b{k}"
            fits = [d for d in dead if sizes[d[0]] == sizes[name]]
            if fits:
                holds[len(steps)] = fits[-1][1], name
                dead.remove(fits[-1])
            steps.append(Reuse(name, fits[-1][0], kind) if fits else Alloc(name, kind))
        for name in ends.get(k, ()):
            dead.append((name, len(steps)))
            steps.append(Free(name))
    found = free_holds(steps, holds, sizes, {}, ())
    highest = [0, 0]
    for which, kept in enumerate((set[int](), found)):
        withdrawn, level = {holds[k][0] for k in kept}, 0
        for k, s in enumerate(steps):
            if isinstance(s, Free):
                level -= sizes[s.name] * (k not in withdrawn)
            else:
                level += sizes[s.name] * (k not in kept)
            highest[which] = max(highest[which], level)
    assert highest[0] == highest[1]


def test_a_call_whose_strides_were_told_wrong_is_laid_as_told() -> None:
    """The fake tensor of `uniform` of a tensor with gaps has gaps, the real one has none."""

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        memory = torch.zeros(12)
        return memory, fn(memory[::2])

    fn = lambda x: x.uniform_().mul(2.0)
    want = draw()
    fn = torch.compile(fn, backend="lenz", options={"eager_random": True})
    for got, expected in zip(draw(), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


SIDE = 512  # of f32, squared: a megabyte, from which on asking who holds a tensor pays


def product_and_scale(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The gradient of b, which is as large as the product, is the product's last reader."""
    return (x @ w) * b


def scaled_product() -> tuple[Callable[..., torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """The function, compiled; leaves for it; and what the gradient of the last has to be."""
    args = [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(3)]
    return torch.compile(product_and_scale, backend="lenz"), args, (args[0] @ args[1]).detach()


def test_a_gradient_takes_the_memory_of_what_was_saved_for_it() -> None:
    fn, args, product = scaled_product()
    places: list[int] = []

    def seen(t: torch.Tensor) -> torch.Tensor:
        places.append(t.data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, seen):
        y = fn(*args)
    y.sum().backward()
    grad = args[2].grad
    assert grad is not None and grad.data_ptr() in places, "the gradient has memory of its own"
    torch.testing.assert_close(grad, product)


def test_a_graph_that_is_kept_keeps_what_it_saved() -> None:
    fn, args, product = scaled_product()
    for _ in range(2):  # AOTAutograd compiled the backward half for a graph that is not kept
        args[2].grad = None
        y = fn(*args).sum()
        y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        y.backward()
        torch.testing.assert_close(args[2].grad, 3 * product)
        args[2].grad = None
        fn(*args).sum().backward()
        torch.testing.assert_close(args[2].grad, product)


@pytest.mark.parametrize("how", ["hook", "view", "saved"])
def test_what_somebody_holds_is_not_overwritten(how: str) -> None:
    fn, args, product = scaled_product()
    kept: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t if how == "hook" else t[:])
        return t

    if how == "saved":
        y = fn(*args)
        assert y.grad_fn is not None
        kept.extend(y.grad_fn.saved_tensors)  # type: ignore[attr-defined]  # of its own class
    else:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = fn(*args)
    y.sum().backward()
    torch.testing.assert_close(args[2].grad, product)
    assert any(torch.equal(t, product) for t in kept), "overwritten"


def test_saved_views_of_one_memory_are_not_overwritten() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        p, q = (x @ w).view(2, SIDE, SIDE)
        return (p * a) + (q * b)

    args = [torch.randn(s, requires_grad=True) for s in
            ((2 * SIDE, 8), (8, SIDE), (SIDE, SIDE), (SIDE, SIDE))]  # fmt: skip
    f(*args).sum().backward()
    want = [x.grad for x in args]
    for x in args:
        x.grad = None
    torch.compile(f, backend="lenz")(*args).sum().backward()
    torch.testing.assert_close([x.grad for x in args], want)
