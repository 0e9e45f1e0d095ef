"""Compiled code that several Python threads run at once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from lenz import recall, respecialise
from lenz.context import Context
from lenz.ir.plan import Boxed
from lenz.options import Options


def test_a_failed_check_is_raised_in_its_own_thread() -> None:
    compiled = torch.compile(lambda x, i: x[i] * 2, backend="lenz", dynamic=False)
    x = torch.randn(50, 8)
    good, bad = torch.arange(40), torch.full((40,), 1000)
    compiled(x, good)

    def outcome(i: torch.Tensor) -> bool:
        try:
            compiled(x, i)
        except IndexError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(outcome, [good, bad] * 200))
    assert results == [True, False] * 200


@torch.library.custom_op("lenz_threads::meet", mutates_args=())
def meet(x: Tensor) -> Tensor:
    return x.clone()


def test_a_call_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.11 nothing but the backend tells other threads that a trace is no user's."""
    monkeypatch.setattr(torch.compiler, "_compile_session_context", nullcontext, raising=False)
    ready = torch.compile(lambda x: x * 2, backend="lenz")
    x, seen = torch.randn(3), list[Tensor]()
    ready(x)

    @meet.register_fake
    def _(y: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(ready, x).result())
        return torch.empty_like(y)

    got = torch.compile(lambda y: meet(y) + 1, backend="lenz")(x)
    torch.testing.assert_close(got, x + 1)
    assert len(seen) > 1, "the op was not traced by AOTAutograd"
    torch.testing.assert_close(seen, [x * 2] * len(seen))
    assert not torch.compiler.is_compiling()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


X, V = numbers(257, 1021), numbers(200_001)
PLACES = torch.randint(0, 40, (20_000,), generator=torch.Generator().manual_seed(0))
LONG = numbers(20_000, 17)


def gradient(w: Tensor) -> Tensor:
    w = w.detach().requires_grad_()
    (dw,) = torch.autograd.grad(F.embedding(PLACES, w).square().sum(), w)
    return dw


SAME: dict[str, Callable[[], Any]] = {
    "sums": lambda: (X.sum(), X.sum(0), X.sum(1), V.sum(), V.norm(), V.std(), V.half().sum()),
    "other reductions": lambda: (X.var(0), V.prod(), X.logsumexp(0), V.argmax(), V.double().sum()),
    "softmax": lambda: (X.softmax(0), X.softmax(1), F.cross_entropy(X, PLACES[:257])),
    "scans": lambda: (V.cumsum(0), X.cumsum(0), X.cumprod(1), V.cummax(0)[0], V.logcumsumexp(0)),
    "scatters": lambda: (
        torch.zeros(40, 17).index_add(0, PLACES, LONG),
        torch.zeros(40, 17).index_put((PLACES,), LONG, accumulate=True),
        torch.zeros(40).scatter_add(0, PLACES, LONG[:, 0]), torch.bincount(PLACES),
        torch.zeros(40, 17).scatter_reduce(0, PLACES[:, None].expand(-1, 17), LONG, "mean"),
    ),
    "gradient of an embedding": lambda: gradient(X[:40]),
    "norms": lambda: (
        F.layer_norm(X, (1021,)), F.batch_norm(X, None, None, training=True),
        F.group_norm(X[:256].reshape(8, 32, 1021), 8),
    ),
    "random numbers": lambda: (F.dropout(X), torch.randn(100_000), torch.rand_like(V) + V),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SAME)
def test_bits_depend_on_no_number_of_threads(name: str) -> None:
    run = torch.compile(SAME[name], backend="lenz")
    usual, first = torch.get_num_threads(), list[Tensor]()
    try:
        for threads in (1, 2, 4, 1):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            found = pytree.tree_leaves(run())
            first = first or [t.clone() for t in found]
            wrong = [n for n, (a, b) in enumerate(zip(found, first, strict=True)) if not a.equal(b)]
            assert not wrong, f"results {wrong} are others with {threads} threads"
    finally:
        torch.set_num_threads(usual)


def test_threads_in_one_function_at_once_keep_their_values() -> None:
    """Two kernels around a library call, with memory that is used again and a check."""

    def f(x: Tensor, i: Tensor) -> Tensor:
        y = F.gelu(x) @ x.t()
        return (y.softmax(-1)[i] * x.sum()).cumsum(-1)

    run = torch.compile(f, backend="lenz", dynamic=False)
    given = [(numbers(40, 30) * k, torch.arange(40).roll(k)) for k in range(8)]
    wanted = [f(*a) for a in given]
    run(*given[0])
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda k: run(*given[k % 8]), range(800)))
    finally:
        sys.setswitchinterval(before)
    for k, r in enumerate(got):
        torch.testing.assert_close(r, wanted[k % 8], rtol=1e-4, atol=1e-4)


def test_threads_that_break_what_was_taken_to_be_so_compile_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, meet = list[object](), threading.Barrier(8)

    def compiled(program: object, cx: Context) -> Boxed:
        made.append(program)
        time.sleep(0.05)
        return lambda args: args

    monkeypatch.setattr(respecialise, "kept", lambda program, args: {})
    monkeypatch.setattr(respecialise, "assuming", lambda program, facts: program)
    cx = recall.context(Options())
    program = SimpleNamespace(facts={}, name="p", kind="inference", eager=lambda: None)
    otherwise = respecialise.Respecialised(program, cx, compiled)  # type: ignore[arg-type]

    def call(k: int) -> Any:
        meet.wait(60)
        return otherwise([k], False)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(8))) == [[k] for k in range(8)]
    assert len(made) == 1
