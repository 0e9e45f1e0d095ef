"""Collectives whose work is done when they are waited for: what they hold, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lenz
from lenz import keys, pipeline
from tests.distributed.programs import arguments, as_function, drawn

if not dist.is_available():
    pytest.skip("torch has no torch.distributed here", allow_module_level=True)

from tests.distributed.late import SEEN, late_group

ops: Any = torch.ops._c10d_functional
OPTIONS: Any = {"verify": True, "cache": False, "on_error": "raise"}


@pytest.fixture
def group() -> Iterator[str]:
    with late_group() as name:
        yield name


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(f, backend="lenz", options=OPTIONS, fullgraph=True)


def copies(args: tuple[Tensor, ...]) -> list[Tensor]:
    return [a.detach().clone().requires_grad_(a.requires_grad) for a in args]


def order(f: Callable[..., Any], args: list[Tensor]) -> tuple[Any, list[str]]:
    """What a function gives, and the collectives that it starts and waits for."""
    SEEN.clear()
    return f(*args), list(SEEN)


def check(f: Callable[..., Any], *args: Tensor) -> None:
    """Two calls give what eager gives, and the same order."""
    run = compiled(f)
    for _ in range(2):
        own, given = copies(args), copies(args)
        want, wanted = order(f, own)
        got, seen = order(run, given)
        assert seen == wanted, "collectives are not called as eager calls them"
        torch.testing.assert_close((got, given), (want, own))


def test_an_argument_is_not_reused_before_the_wait(group: str) -> None:
    def f(x: Tensor) -> Any:
        t = x * 2
        flying = ops.all_to_all_single(t, [8, 8], [8, 8], group)
        z = x + 5
        return torch.mm(z, z) + 1, ops.wait_tensor(flying)

    check(f, torch.randn(16, 16))


def test_a_view_of_an_argument_is_not_reused_before_the_wait(group: str) -> None:
    def f(x: Tensor) -> Any:
        t = x * 2
        flying = ops.all_to_all_single(t.view(8, 32)[2:6], [2, 2], [2, 2], group)
        z = torch.mm(x + 5, x)
        return z.relu() + 1, ops.wait_tensor(flying.view(-1)) + 1

    check(f, torch.randn(16, 16))


def test_what_is_read_by_its_first_name_is_read_behind_the_wait(group: str) -> None:
    def f(x: Tensor) -> Any:
        near = x * 3
        flying = ops.all_reduce(x * 2, "sum", group)
        part = flying.view(2, -1)[1]
        ops.wait_tensor(flying)
        return near + 1, flying * 3 + near, part.sum()

    check(f, torch.randn(16, 16))


def test_strides_of_a_result_are_the_real_ones(group: str) -> None:
    """torch 2.13 tells fake tensors of a broadcast of a transposed matrix wrong strides."""

    def f(x: Tensor) -> Any:
        flying = ops.broadcast((x * 2).t(), 0, group)
        part = flying[1:3]
        return ops.wait_tensor(flying) + 1, part * 2

    check(f, torch.randn(16, 4))


def test_an_argument_is_written_behind_the_wait(group: str) -> None:
    def f(x: Tensor) -> Any:
        flying = ops.all_to_all_single(x, [8, 8], [8, 8], group)
        y = ops.wait_tensor(flying) * 2
        x.add_(1)
        return y

    check(f, torch.randn(16, 16))


def test_a_wait_for_a_collective_of_another_graph_comes_before_writes(group: str) -> None:
    def first(x: Tensor) -> Any:
        return ops.all_to_all_single(x, [8, 8], [8, 8], group)

    def second(x: Tensor, flying: Tensor) -> Any:
        x.mul_(3)  # a value that nothing has to wait for
        return ops.wait_tensor(flying) + 1

    def both(f: Callable[..., Any], g: Callable[..., Any]) -> Any:
        x = torch.arange(256.0).view(16, 16)
        flying = f(x)
        waited = ops.wait_tensor(flying)
        return waited, g(x, flying), x

    torch.testing.assert_close(both(compiled(first), compiled(second)), both(first, second))


def test_a_result_that_leaves_unwaited_keeps_its_argument(group: str) -> None:
    def f(x: Tensor) -> Any:
        t = x * 2
        flying = ops.all_to_all_single(t, [8, 8], [8, 8], group)
        z = x + 5
        return flying, torch.mm(z, z).relu() + 1, z.sin() @ z

    x = torch.randn(16, 16)
    want, got = f(x), compiled(f)(x)
    fresh = [torch.full((16, 16), 7.0) for _ in range(8)]  # takes memory that was freed
    torch.testing.assert_close(
        (ops.wait_tensor(got[0]), *got[1:]), (ops.wait_tensor(want[0]), *want[1:])
    )
    assert len(fresh) == 8


def test_no_collective_is_merged_or_dropped(group: str) -> None:
    def f(x: Tensor) -> Any:
        a = ops.wait_tensor(ops.all_reduce(x, "sum", group))
        b = ops.wait_tensor(ops.all_reduce(x, "sum", group))
        ops.wait_tensor(ops.broadcast(x + 1, 0, group))
        ops.all_reduce(x * 2, "sum", group)
        return a + b

    check(f, torch.randn(16, 16))
    check(f, torch.randn(16, 16, requires_grad=True))


def test_fusion_moves_no_collective_over_another(group: str) -> None:
    """`b` reads what `a` reads, and would share its kernel, which the second call waits for."""

    def f(x: Tensor, y: Tensor) -> Any:
        a = x * 2 + y
        one = ops.all_reduce(y.sin(), "sum", group)
        two = ops.all_reduce(a, "sum", group)
        b = x * 3 + ops.wait_tensor(one)
        return ops.wait_tensor(two), b, ops.wait_tensor(ops.broadcast(b, 0, group))

    check(f, torch.randn(16, 16), torch.randn(16, 16))


def test_gradients_of_collectives(group: str) -> None:
    own: Any = torch.ops._c10d_functional_autograd

    def f(x: Tensor) -> Tensor:
        t = (x * 2).sin()
        flying = own.all_to_all_single(t, [8, 8], [8, 8], group)
        z = torch.mm(x + 5, x)
        y: Tensor = ops.wait_tensor(flying).cos() + z
        return y

    x = torch.randn(16, 16)
    found = []
    for run in (f, compiled(f)):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.sin().sum().backward()
        found.append((y, leaf.grad))
    torch.testing.assert_close(found[1], found[0])


def test_memory_serves_again_behind_the_wait(group: str) -> None:
    def f(x: Tensor) -> Any:
        t = x * 2
        y = ops.wait_tensor(ops.all_to_all_single(t, [8, 8], [8, 8], group))
        return torch.mm(y, x)

    report = lenz.explain(f, options=OPTIONS)(torch.randn(16, 16))
    (graph,) = report.graphs
    assert [a.reused_from for a in graph.allocs] == [None, "mul"], graph.source


@pytest.mark.one_in(6)
@pytest.mark.parametrize("seed", range(12))
def test_random_program(seed: int, group: str) -> None:
    f = as_function(drawn(seed, 24, real=False), group, 2)
    check(f, *arguments(seed))


def test_a_recalled_program_has_the_same_order(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "sources", lambda again=False: "one version")
    f = as_function(drawn(3, 24, real=False), group, 2)
    want, wanted = order(f, arguments(3))
    for is_recalled in (False, True):
        if is_recalled:
            monkeypatch.setattr(pipeline, "compile_program", None)  # it has to be found
        torch._dynamo.reset()
        options: Any = {"cache_dir": str(tmp_path), "on_error": "raise"}
        run = torch.compile(f, backend="lenz", options=options, fullgraph=True)
        got, seen = order(run, arguments(3))
        assert seen == wanted
        torch.testing.assert_close(got, want)


KEPT: list[Tensor] = []


@torch.library.custom_op("lenz_late::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    KEPT.append(x)
    return x.sum()


@keep.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(())


def test_what_a_custom_op_keeps_is_not_reused() -> None:
    def f(x: Tensor) -> Any:
        t = x * 2
        total = keep(t)
        z = x + 5
        return torch.mm(z, z).relu() + total, z.sin() @ z

    x = torch.randn(16, 16)
    KEPT.clear()
    compiled(f)(x)
    torch.testing.assert_close(KEPT[0], x * 2)
