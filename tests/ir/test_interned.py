"""Tables of interned expressions forget what nothing holds, and nothing else."""

from __future__ import annotations

import gc
from threading import Event, Thread

import pytest
import torch

from lenz import ops
from lenz.ir import interned
from lenz.ir.dtype import F32
from lenz.ir.expr import Expr, const, load
from lenz.sym import ONE, ZERO, Int, Sym, Var, maximum


def index(n: int) -> Sym:
    """Sums, products, quotients, remainders and extremes of variables that no other test has."""
    i, j = Var(f"interned_i{n}", 0, 1000 + n), Var(f"interned_j{n}", 0, 77)
    return (i * 7901 + j) // 7919 + (i * j) % 7907 + maximum(i, j + 7927) + n


def body(n: int) -> Expr:
    return ops.add(load("x", (index(n),), F32), const(0.7919 + n, F32))


@pytest.mark.slow
def test_the_dead_are_dropped_and_the_living_stay_one() -> None:
    gc.collect()  # or what other tests have left dies in between
    interned.release()
    before = interned.entries()
    kept = body(1)
    interned.release()
    alone = interned.entries()
    assert alone > before + 5, "all that the body is made of lives"
    for n in range(2, 40):
        body(n)
    assert interned.entries() > alone + 38 * 5
    interned.release()
    assert interned.entries() == alone, "38 bodies are dead"
    assert body(1) is kept and index(1) is index(1), "equal expressions are one object"
    assert Int(0) is ZERO and Int(1) is ONE
    del kept
    interned.release()
    assert interned.entries() == before


def test_nothing_is_dropped_while_anybody_compiles() -> None:
    """A part of an expression is held by nothing while another thread looks it up."""
    begun, done = Event(), Event()

    def compiles() -> None:
        with interned.using():
            body(50)
            begun.set()
            done.wait(60)

    other = Thread(target=compiles)
    other.start()
    begun.wait(60)
    count = interned.entries()
    interned.release()
    assert interned.entries() == count
    done.set()
    other.join()
    interned.release()
    assert interned.entries() < count


def test_tables_that_have_doubled_are_emptied_without_a_reset() -> None:
    interned.release()
    most = 2 * interned.entries() + interned.FREE
    for n in range(interned.FREE // 5):
        with interned.using():
            body(n)
        assert interned.entries() <= most + 100


@pytest.mark.rest
@pytest.mark.slow
def test_a_reset_of_dynamo_forgets_the_expressions_of_its_graphs() -> None:
    torch._dynamo.reset()
    counts = []
    for n in range(3):
        run = torch.compile(lambda x: (x.softmax(-1) * 2).sum(-1), backend="lenz", dynamic=False)
        run(torch.ones(7001 + n, 3))
        del run
        torch._dynamo.reset()
        gc.collect()
        interned.release()
        counts.append(interned.entries())
    assert counts[2] <= counts[1] + 2, counts
