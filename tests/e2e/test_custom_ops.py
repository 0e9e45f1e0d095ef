"""Ops that users add: effects, autograd, results of data-dependent size, wrong fake forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, randn

from lenz import explain
from lenz.errors import UserError
from tests.e2e.sides import agree, gradients_agree

op = torch.library.custom_op


@op("lenz_custom::triple", mutates_args=())
def triple(x: Tensor, a: float) -> Tensor:
    return x * 3 * a


@triple.register_fake
def _(x: Tensor, a: float) -> Tensor:
    return torch.empty_like(x)


def triple_backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    return g * 3 * ctx.a, None


def triple_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.a = inputs[1]


triple.register_autograd(triple_backward, setup_context=triple_context)


@op("lenz_custom::inc_all", mutates_args=("xs",))
def inc_all(xs: list[Tensor]) -> None:
    for x in xs:
        x.add_(1)


@op("lenz_custom::parts", mutates_args=())
def parts(x: Tensor, like: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], int]:
    y = x if like is None else x + like
    return y.to(dtype, copy=True), [y.sum(), y * 2], y.dim()


@parts.register_fake
def _(x: Tensor, like: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], int]:
    return torch.empty_like(x, dtype=dtype), [x.new_empty(()), torch.empty_like(x)], x.dim()


@op("lenz_custom::places", mutates_args=())
def places(x: Tensor) -> Tensor:
    return x.nonzero().contiguous()


@places.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty([torch.library.get_ctx().new_dynamic_size(), x.dim()], dtype=torch.int64)


@op("lenz_custom::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).t()


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1])  # its strides are others


@op("lenz_custom::short", mutates_args=())
def short(x: Tensor) -> Tensor:
    return x[1:].clone()


@short.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@op("lenz_custom::boom", mutates_args=())
def boom(x: Tensor) -> Tensor:
    raise ArithmeticError("boom")


@boom.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@op("lenz_custom::counts", mutates_args=())
def counts(x: Tensor) -> tuple[int, int]:
    return int((x > 0).sum()), int((x <= 0).sum())


@counts.register_fake
def _(x: Tensor) -> tuple[int, int]:
    context = torch.library.get_ctx()
    return context.new_dynamic_size(), context.new_dynamic_size()  # type: ignore[return-value]


LIB = torch.library.Library("lenz_custom", "FRAGMENT")
LIB.define("swapped(Tensor x, SymInt a, SymInt b) -> (Tensor, SymInt, SymInt)")
LIB.impl("swapped", lambda x, a, b: (x + 1, b, a), "CPU")
LIB.impl("swapped", lambda x, a, b: (torch.empty_like(x), b, a), "Meta")


CASES: list[Callable[..., Any]] = [
    lambda x, y: triple(x + 1, 2.0).sin(),
    lambda x, y: (inc_all([x, y + 0, y]), x + y)[1],
    lambda x, y: (inc_all([x[1:3], y.t()]), x + y)[1],
    lambda x, y: parts(x + 1, None, torch.float64),
    lambda x, y: parts(x, y * 2, torch.float16)[1][1] + 1,
]


@pytest.mark.filterwarnings("ignore:.*in eager.*")
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("number", range(len(CASES)))
def test_values_and_effects(number: int, dynamic: bool) -> None:
    def make() -> tuple[Tensor, Tensor]:
        return randn(6, 5), randn(5, 6).t()

    agree(CASES[number], make, dynamic=dynamic, calls=2)


def test_gradients() -> None:
    gradients_agree(lambda x: triple(x.cos(), 2.0).sin(), lambda: (randn(5, requires_grad=True),))


@pytest.mark.filterwarnings("ignore:.*in eager.*")
def test_a_size_that_only_the_op_knows() -> None:
    config = torch._dynamo.config
    with config.patch(capture_dynamic_output_shape_ops=True):
        agree(lambda x: places(x > 0) * 2, lambda: (randn(5, 6),), fullgraph=True)


@pytest.mark.filterwarnings("error")
def test_numbers_that_only_the_op_knows() -> None:
    config = torch._dynamo.config

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = counts(x)
        torch._check(a >= 0)
        torch._check(b >= 0)
        return torch.zeros(a), torch.ones(b)

    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        agree(fn, lambda: (randn(5, 6),), fullgraph=True)


def test_ops_that_return_sizes_which_are_known() -> None:
    """The second op returns the sizes of the first again."""

    def fn(x: Tensor) -> tuple[Any, ...]:
        y, b, a = torch.ops.lenz_custom.swapped(x, x.shape[0], x.shape[1])
        z, d, c = torch.ops.lenz_custom.swapped(y, a, b)
        return z * 2, a, b, c, d

    run = torch.compile(fn, backend="lenz", dynamic=True)
    for n in (7, 2, 1000, 1000, 3):
        assert run(randn(n, 5))[1:] == (n, 5, n, 5)


def test_a_fake_form_with_other_strides() -> None:
    """Kernels read the result by its fake strides; eager's are what the caller would see."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = turned(x)
        return y * 2 + x.t(), y[1:].sum(0)

    agree(fn, lambda: (randn(6, 5),), strides=False)
    agree(fn, lambda: (randn(6, 5),), strides=False, dynamic=True)


@op("lenz_custom::narrow", mutates_args=())
def narrow(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=torch.uint8)


@narrow.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float64)


@op("lenz_custom::nowhere", mutates_args=())
def nowhere(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")


@op("lenz_custom::nothing", mutates_args=())
def nothing(x: Tensor) -> Tensor:
    return None  # type: ignore[return-value]  # the fault that is looked for


@op("lenz_custom::pair", mutates_args=())
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x.to(torch.float16)


@op("lenz_custom::few", mutates_args=())
def few(x: Tensor) -> list[Tensor]:
    return [x + 1]


for named, told in (
    (nowhere, torch.empty_like),
    (nothing, torch.empty_like),
    (pair, lambda x: (torch.empty_like(x), torch.empty_like(x))),
    (few, lambda x: [torch.empty_like(x), torch.empty_like(x)]),
):
    named.register_fake(told)

LIES: dict[str, Callable[[Tensor], Any]] = {
    "short": lambda x: short(x) + 1,
    "narrow": lambda x: narrow(x) + 1,  # read as float64 this was memory beyond the result's
    "nowhere": lambda x: nowhere(x) + 1,
    "nothing": lambda x: nothing(x) + 1,
    "pair": lambda x: pair(x)[1] + 1,
    "few": lambda x: few(x)[0] + 1,
}


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", LIES)
def test_a_fake_form_that_lies_is_named(name: str, dynamic: bool) -> None:
    run = torch.compile(LIES[name], backend="lenz", dynamic=dynamic)
    with pytest.raises(UserError, match=rf"lenz_custom\.{name}\.default returned .*fake"):
        run(randn(1 << 10))


def test_an_error_of_the_op_leaves_unchanged() -> None:
    run = torch.compile(lambda x, y: (x.add_(1), boom(y) + 1)[1], backend="lenz")
    with pytest.raises(ArithmeticError, match="boom"):
        run(randn(3), randn(3))


@op("lenz_custom::put_rows", mutates_args=("k", "v"))
def put_rows(k: Tensor, v: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    k[at], v[at] = rows, rows * 2
    return rows + 1


@put_rows.register_fake
def _(k: Tensor, v: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    return torch.empty_like(rows)


@op("lenz_custom::inc_some", mutates_args=("x", "ys", "z"))
def inc_some(x: Tensor, ys: list[Tensor], z: Tensor | None) -> None:
    for t in (x, *ys, *([] if z is None else [z])):
        t.add_(1)


def puts(kv: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    torch.ops.lenz_custom.put_rows(kv[0], kv[1], rows, at)
    made: Tensor = torch.ops.lenz_custom.put_rows(kv[1], kv[0], rows, at + 1)
    return made + kv[0].sum()


def views(x: Tensor, y: Tensor) -> Tensor:
    torch.ops.lenz_custom.inc_some(x[1:], [y[0], y.t(), x.view(-1)[::2]], None)
    return x.sum() + y


def read_before(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    before, later = x * 2, y.sum()
    torch.ops.lenz_custom.inc_some(x, [], y)
    return before + x, later


def made_inside(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a, b = torch.zeros_like(x), x + 1
    torch.ops.lenz_custom.inc_some(a, [b[0]], None)
    return a, b * 2, x - y


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("f", (views, read_before, made_inside), ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", (torch.float32, torch.complex64, torch.int16))
def test_writes(f: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    agree(
        f, lambda: [randn(6, 4).to(dtype), randn(6, 4).to(dtype)], fullgraph=True, dynamic=dynamic
    )


def test_a_cache_is_written_in_place() -> None:
    """Both calls write the argument itself: copies of a large cache would take longer than all."""
    at = torch.tensor([2, 90, 40])
    agree(puts, lambda: [randn(2, 100, 8), randn(3, 8), at], fullgraph=True)
    told = explain(puts)(randn(2, 100, 8), randn(3, 8), at)
    (graph,) = told.graphs
    calls = [e for e in graph.externs if e.op == "lenz_custom.put_rows.default"]
    assert len(calls) == 2 and calls[0].mutated_args == ("kv",), graph
    assert graph.peak < 4 * 2 * 100 * 8, graph


def filled(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Ops with results that the caller gives, of which torch's form allocates its own."""
    ops: Any = torch.ops.lenz_custom_out
    one = ops.one(x + 1, out=y)
    new = ops.one(one * 2, out=torch.empty_like(x))
    two, three = ops.two(x, out=torch.empty_like(x), other=torch.empty_like(x))
    return new - x, y.sum(), two + three


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch compiles no op with out=")
@pytest.mark.parametrize("dynamic", (False, True))
def test_results_that_the_caller_gives(dynamic: bool) -> None:
    tags: Any = (torch.Tag.out,)
    with torch.library._scoped_library("lenz_custom_out", "DEF") as library:
        library.define("one(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=tags)
        two = "two(Tensor x, *, Tensor(a!) out, Tensor(b!) other) -> (Tensor(a!), Tensor(b!))"
        library.define(two, tags=tags)
        kind = "CompositeExplicitAutograd"
        library.impl("one", lambda x, out: out.copy_(x * 2), kind)
        library.impl("two", lambda x, out, other: (out.copy_(x), other.copy_(x + 3)), kind)
        agree(filled, lambda: [randn(3, 4), randn(3, 4)], fullgraph=True, dynamic=dynamic)
