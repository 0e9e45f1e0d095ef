"""What depends on no input is filled, stored, or left a loop; and the numbers stay eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.frontend import FxProgram
from lenz.frontend.capture import capture
from lenz.lower import native_ops
from lenz.options import Options
from tests.cuda import cuda_program

OPTIONS = Options(cache=False, verify=True)


def program(f: Callable[..., Any], *args: Any, **options: Any) -> FxProgram:
    """The program of `f`, whose results twice in a row are eager's, strides included."""
    found: list[FxProgram] = []

    def compile_fx(p: FxProgram) -> Callable[[list[Any]], Sequence[Any]]:
        found.append(p)
        return p.eager()

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture(gm, inputs, compile_fx, OPTIONS, native_ops())

    compiled, lenz = torch.compile(f, backend=backend, **options), torch.compile(f, backend="lenz")
    for _ in range(2):
        want, got, ours = f(*args), compiled(*args), lenz(*args)
        for result in (got, ours):
            torch.testing.assert_close(result, want, equal_nan=True)
        assert [t.stride() for t in got] == [t.stride() for t in want]
    (p,) = found
    return p


def targets(p: FxProgram) -> list[str]:
    return [str(n.target) for n in p.nodes]


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: torch.arange(8) >= 0,
        lambda x: (torch.arange(8)[:, None] < 8) & torch.ones_like(x, dtype=torch.bool),
        lambda x: torch.arange(8).new_ones(()).bool().expand(8, 8),
    ],
)
def test_uniform_values_become_fills(mask: Callable[[Tensor], Tensor]) -> None:
    p = program(lambda x: (torch.where(mask(x), x, 0.0),), torch.randn(8, 8))
    assert "aten.arange.default" not in targets(p)
    assert "aten.full.default" in targets(p)
    assert not p.constants


@pytest.mark.parametrize(
    "known",
    [
        lambda x: torch.zeros_like(x.mT),
        lambda x: torch.arange(8)[:, None].ge(0).expand(8, 8),
        lambda x: torch.zeros(8, 16)[:, ::2].mT,
    ],
)
def test_fills_have_the_strides_of_what_they_replace(known: Callable[[Tensor], Tensor]) -> None:
    """In eager, which runs the graph where lenz cannot, they decide on the strides of results."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return known(x).to(x.dtype).neg(), torch.where(known(x) > 1, x.mT, 1.0)

    assert "aten.full.default" in targets(program(f, torch.randn(8, 8)))


def test_zeros_of_both_signs_are_not_uniform() -> None:
    def f(x: Tensor) -> tuple[Tensor]:
        return (x / torch.where(torch.arange(8) < 4, 0.0, -0.0),)

    assert "aten.arange.default" in targets(program(f, torch.randn(8)))


def test_small_values_for_library_calls_become_constants() -> None:
    def f(x: Tensor) -> tuple[Tensor]:
        positions = torch.arange(16)[None, None, :].expand(2, 1, 16).float()
        return (torch.bmm(x, positions),)

    p = program(f, torch.randn(2, 5, 1))
    assert targets(p) == ["aten.bmm.default"]
    (constant,) = p.constants.values()
    assert constant.stride() == (0, 0, 1) or constant.is_contiguous()


def test_constants_of_zeros_without_memory_have_memory() -> None:
    """Tangents of constants are such zeros; the gradient of this multiplies a matrix by them."""
    x, w = torch.randn(8), torch.randn(16, 8, requires_grad=True)
    v = torch.randn(4, 16, requires_grad=True)

    def f() -> Tensor:
        return torch.func.jacfwd(lambda x: v @ (w @ x).tanh())(x)

    run = torch.compile(f, backend="lenz", options={"on_error": "raise"})
    got, want = (torch.autograd.grad(g().sum(), (w, v)) for g in (run, f))
    torch.testing.assert_close(got, want)


def test_large_values_for_library_calls_are_computed() -> None:
    p = program(lambda x: (x @ torch.ones(128, 64).tril(),), torch.randn(4, 128))
    assert "aten.mm.default" in targets(p) and not p.constants


def test_masks_that_are_not_uniform_stay_loops() -> None:
    def f(x: Tensor) -> tuple[Tensor]:
        return (x.masked_fill(torch.ones(8, 8).triu(1).bool(), -1),)

    p = program(f, torch.randn(8, 8))
    assert not p.constants and "aten.triu.default" in targets(p)


def test_results_are_new_memory_on_every_call() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.arange(4.0)
        return x @ table, table.view(2, 2)

    p = program(f, torch.randn(3, 4))
    assert not p.constants


def test_values_that_are_written_are_computed() -> None:
    def f(x: Tensor, out: Tensor) -> tuple[Tensor]:
        out.copy_(torch.ones(3))
        return (torch.mv(x, out),)

    program(f, torch.randn(4, 3), torch.zeros(3))


def test_random_and_symbolic_values_stay() -> None:
    def f(x: Tensor) -> tuple[Tensor]:
        return (torch.ones(2, x.shape[0]) @ x @ (torch.rand(4, 4) < 2).float(),)

    p = program(f, torch.randn(3, 4), dynamic=True)
    assert "aten.rand.default" in targets(p) and not p.constants


def test_values_of_plain_shape_may_follow_a_symbolic_size() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        mask = torch.arange(10) < n
        return (
            x + x.numel() / 3.0,
            x / (n**0.5 + 1),
            x.sum() + mask,
            torch.full((3, 3), n) @ mask[:3].long(),
        )

    compiled = torch.compile(f, backend="lenz", dynamic=True)
    for n in (5, 3, 40):
        x = torch.ones(n, 7)
        torch.testing.assert_close(compiled(x), f(x))


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "divide",
    [lambda a, b: torch.div(a, b, rounding_mode="trunc"), torch.ops.prims.div],
    ids=("div", "prims.div"),
)
def test_what_a_cpu_traps_on_is_not_computed_for_a_gpu(
    divide: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """The least integer by -1: eager on CPUs ends the process (SIGFPE), a GPU gives a number."""

    def fn(x: Tensor) -> Tensor:
        least = torch.full((4,), -(2**63), device=x.device)
        return x @ divide(least, torch.full_like(least, -1)).float()

    p = cuda_program(fn, (4,), dtype=torch.float32)
    assert any("div" in t for t in targets(p)) and not p.constants


def test_integers_of_floats_beyond_them_are_not_computed_for_a_gpu() -> None:
    """x86 gives the lowest integer for 1e10 and for NaN, a GPU the highest and 0."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        great, none = [torch.full((4,), v, device=x.device) for v in (1e10, float("nan"))]
        return x + great.int(), x + none.int(), x @ great.int().float()

    p = cuda_program(fn, (4,), dtype=torch.float32)
    assert "aten._to_copy.default" in targets(p) and not p.constants
    filled = [n.args[1] for n in p.gm.graph.nodes if str(n.target) == "aten.full.default"]
    assert -(2**31) not in filled
