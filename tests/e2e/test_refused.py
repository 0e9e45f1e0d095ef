"""What eager refuses by type, by shape or by value is refused, with eager's error."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, rand, tensor, zeros

import lenz

I64, F64 = torch.int64, torch.float64
ONES, NONE = torch.ones(2, dtype=I64), zeros(2, dtype=I64)
BOOLS = tensor([True, False])
INTS = torch.ones(1, 4, 8, 8, dtype=I64)
Case = tuple[Callable[..., Any], tuple[Tensor, ...]]

# Fake tensors take all of these, and so did lowerings or torch's decompositions.
TYPES: dict[str, Case] = {
    "bool - 1": (lambda b: b - 1, (BOOLS,)),
    "1 - bool": (lambda b: 1 - b, (BOOLS,)),
    "bool - bool": (lambda b: b - b, (BOOLS,)),
    "bool -= bool": (lambda b: b.clone().sub_(b), (BOOLS,)),
    "float - bool": (lambda x, b: x - b, (rand(2), BOOLS)),
    "float - True": (lambda x: x - True, (rand(2),)),
    "False - integer": (lambda x: torch.rsub(x, False), (ONES,)),
    "random integers like": (lambda x: torch.rand_like(x), (ONES,)),
    "random bools": (lambda x: torch.randn(2, dtype=torch.bool) & x, (BOOLS,)),
    "floor of bool": (lambda b: b.floor(), (BOOLS,)),
    "frac of integers": (lambda x: x.frac(), (ONES,)),
    "lerp of integers": (lambda x: torch.lerp(x, x, 0.5), (ONES,)),
    "var of integers": (lambda x: x.var(), (ONES,)),
    "gelu of integers": (lambda x: F.gelu(x), (ONES,)),
    "celu of integers": (lambda x: F.celu(x), (ONES,)),
    "log_softmax of integers": (lambda x: x.log_softmax(0), (ONES,)),
    "complex of two types": (torch.complex, (rand(3), rand(3, dtype=F64))),
    "heaviside of two types": (torch.heaviside, (rand(3), rand(3, dtype=F64))),
    "cross of two types": (lambda x, y: torch.linalg.cross(x, y), (rand(3), rand(3, dtype=F64))),
    "a product of two types": (torch.mv, (rand(3, 3), rand(3, dtype=F64))),
    "layer norm of two types": (
        lambda x, w: F.layer_norm(x, (3,), w), (rand(2, 3), rand(3, dtype=F64)),
    ),
    "batch norm of two types": (
        lambda x, m: F.batch_norm(x, m, m), (rand(2, 3), rand(3, dtype=F64)),
    ),
    "adaptive max of integers": (lambda x: F.adaptive_max_pool2d(x, 4), (INTS,)),
    "fractional max of integers": (lambda x: F.fractional_max_pool2d(x, 2, output_size=3), (INTS,)),
    "logcumsumexp of integers": (lambda x: x.logcumsumexp(0), (ONES,)),
    "put of two types": (lambda x, i, y: x.put(i, y), (rand(3), NONE, rand(2, dtype=F64))),
    "index_add of two types": (
        lambda x, i, y: x.index_add(0, i, y), (rand(3), NONE, rand(2, dtype=F64)),
    ),
    "loss of classes by i32": (lambda x, y: F.nll_loss(x, y), (rand(2, 3), ONES.int())),
}  # fmt: skip
BYTES = torch.ones(2, dtype=torch.uint8)
OVERFLOWS: dict[str, Case] = {
    "full": (lambda x: x + torch.full((2,), 300, dtype=torch.uint8), (BYTES,)),
    "full_like": (lambda x: torch.full_like(x, -300), (BYTES,)),
    "fill_": (lambda x: x.clone().fill_(float("nan")), (BYTES,)),
    "masked_fill": (lambda x, m: x.masked_fill(m, 300), (BYTES, BOOLS)),
    "where": (lambda x, m: torch.where(m, x, 300), (BYTES, BOOLS)),
    "clamp beyond": (lambda x: x.clamp(0, 300), (BYTES,)),
    "pad": (lambda x: F.pad(x, (1, 1), value=300), (BYTES,)),
    "index_fill": (lambda x: x.index_fill(0, tensor([0]), 300), (BYTES,)),
    "scatter 300": (lambda x: x.scatter(0, tensor([0]), 300), (BYTES,)),
    "fill of 1j": (lambda x: x.clone().fill_(1j), (rand(3),)),
    "index_fill of 1j": (lambda x: x.index_fill(0, tensor([0]), 1j), (rand(3),)),
    "addcmul by 1j": (lambda x: torch.addcmul(x, x, x, value=1j), (rand(3),)),  # type: ignore[call-overload]
}
SHAPES: dict[str, Case] = {
    "bucketize between rows": (torch.bucketize, (rand(3), rand(2, 2))),
    "diagonal_scatter": (torch.diagonal_scatter, (rand(3, 3), rand(2))),
    "select_scatter": (lambda x, y: x.select_scatter(y, 0, 0), (rand(3, 3), rand(1, 3))),
    "slice_scatter": (lambda x, y: x.slice_scatter(y, 0, 0, 2), (rand(3, 3), rand(1, 3))),
    "put of more values": (lambda x, y: x.put(tensor([0]), y), (rand(3), rand(2))),
    "put of fewer values": (lambda x, y: x.put(tensor([0, 1, 2]), y), (rand(3), rand(2))),
    "celu by 0": (lambda x: F.celu(x, 0.0), (rand(3),)),
    "pixel_unshuffle of nothing": (lambda x: F.pixel_unshuffle(x, 3), (rand(0, 1, 4, 3),)),
    "index_select of no dimension": (lambda x, i: x.index_select(5, i), (tensor(0.5), tensor([0]))),
    "index_reduce of no dimension": (
        lambda x, i: x.index_reduce(-2, i, x, "prod"),
        (rand(1), tensor([0])),
    ),
    "cummax of no dimension": (lambda x: x.cummax(2).values, (tensor(0.5),)),
    "slice_scatter of a number": (lambda x: x.slice_scatter(x, 0), (tensor(0.5),)),
    "put at int32": (lambda x, i: x.put(i, x[:1]), (rand(3), tensor([1]).int())),
    "a shorter mask": (lambda x, m: x.index_put((m,), x[0]), (rand(3, 4), zeros(2) < 1)),
    "a longer mask": (lambda x, m: x.index_put((m,), x[0]), (rand(3, 4), zeros(4) < 1)),
    "a mask of few columns": (
        lambda x, m: x.index_put((m,), x[0, 0], accumulate=True),
        (rand(3, 4), zeros(3, 2) < 1),
    ),
    "a mask of more dimensions": (
        lambda x, m: x.index_put((m,), x[0, 0]),
        (rand(3, 4), zeros(3, 4, 1) < 1),
    ),
    "index_reduce by a sum": (
        lambda x, y: x.index_reduce(0, tensor([0]), y, "sum"),
        (rand(3, 4), rand(1, 4)),
    ),
    "addmv": (torch.addmv, (rand(2, 3), rand(3, 3), rand(3))),
    "statistics of rows": (lambda x, m: F.batch_norm(x, m, m), (rand(2, 3), rand(1, 3))),
}
VALUES: dict[str, Case] = {
    "x // 0": (lambda x: x // 0, (ONES,)),
    "x // y": (lambda x, y: x // y, (ONES, NONE)),
    "x // zeros": (lambda x: x // zeros(2, dtype=I64), (ONES,)),
    "x % zeros": (lambda x: x % zeros(2, dtype=I64), (ONES,)),
    "fmod of zeros": (torch.fmod, (ONES, NONE)),
    "ones // zeros": (lambda x: x + torch.ones(2, dtype=I64) // zeros(2, dtype=I64), (ONES,)),
    "0 x // 0 x": (lambda x: (x * 0) // (x * 0), (ONES,)),
    "1 % 0": (lambda x: 1 % x, (NONE,)),
    "gather": (lambda x, i: x.gather(0, i), (rand(3), tensor([0, -1]))),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), (rand(3), tensor([0, 3]))),
    "put": (lambda x, i: x.put(i, x[:1]), (rand(3), tensor([3]))),
    "embedding": (lambda i, x: F.embedding(i, x), (tensor([0, -1]), rand(3, 2))),
    "one_hot of -1": (lambda i: F.one_hot(i, 4), (tensor([0, -1]),)),
    "one_hot of 4": (lambda i: F.one_hot(i, 4), (tensor([0, 4]),)),
    "arange of bools": (lambda x: x == torch.arange(2, dtype=torch.bool), (ONES > 0,)),
    "linspace of bools": (lambda x: x == torch.linspace(0, 1, 2, dtype=torch.bool), (ONES > 0,)),
    "logspace of bools": (lambda x: x == torch.logspace(0, 1, 2, dtype=torch.bool), (ONES > 0,)),
    "cross_entropy": (lambda x, i: F.cross_entropy(x, i), (rand(2, 3), tensor([0, -1]))),
    "max_unpool1d": (lambda x, i: F.max_unpool1d(x, i, 2), (rand(1, 1, 2), tensor([[[0, 9]]]))),  # type: ignore[arg-type]
    "max_unpool2d": (lambda x, i: F.max_unpool2d(x, i, 2), (rand(1, 1, 1), tensor([[[-1]]]))),  # type: ignore[arg-type]
    "masked_scatter": (lambda x, m: x.masked_scatter(m, x[:1]), (rand(3), rand(3) < 2)),
    "multinomial of nan": (lambda p: torch.multinomial(p, 1), (tensor([float("nan"), 1.0]),)),
    "multinomial of 0": (lambda p: torch.multinomial(p, 1), (zeros(2),)),
    "bernoulli": (torch.bernoulli, (tensor([2.0]),)),
    "poisson": (torch.poisson, (tensor([-2.0]),)),
    "a target beyond 1": (lambda p: F.binary_cross_entropy(p, p * 9), (tensor([0.5]),)),
    "cholesky": (torch.linalg.cholesky, (-torch.eye(3),)),
    "inverse": (torch.linalg.inv, (zeros(3, 3),)),
    "bincount": (torch.bincount, (tensor([-1, 2]),)),
    "repeat_interleave": (lambda x: x.repeat_interleave(x), (tensor([-1, 2]),)),
    "histc to infinity": (torch.histc, (tensor([float("inf")]),)),
    "integers ** -1": (lambda x: x**-1, (ONES,)),
    "multi_margin_loss": (lambda x, i: F.multi_margin_loss(x, i), (rand(1, 3), tensor([3]))),
    "offsets of bags": (
        lambda x, o: F.embedding_bag(tensor([0, 1]), x, o), (rand(3, 2), tensor([0, 7])),
    ),
}  # fmt: skip
CASES = {**TYPES, **OVERFLOWS, **SHAPES, **VALUES}


def test_logspace_of_a_negative_base_is_eagers() -> None:
    """torch's decomposition has none: "a bug in lenz", and the whole graph ran in eager."""
    f = lambda x: x + torch.logspace(0, 2, 3, -2.0)
    got = torch.compile(f, backend="lenz", options={"on_error": "raise"})(zeros(3))
    torch.testing.assert_close(got, tensor([1.0, -2.0, 4.0]))


def refusal(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> Exception | None:
    """The error of a first call, if it raises."""
    torch._dynamo.reset()
    return error_of(fn, args)


def error_of(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> Exception | None:
    """The error of a call, if it raises."""
    try:
        fn(*[a.clone() for a in args])
    except Exception as e:  # noqa: BLE001  # whatever is raised is compared
        return e
    return None


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", CASES)
def test_what_eager_refuses_raises_its_error(name: str, dynamic: bool) -> None:
    fn, args = CASES[name]
    wanted = refusal(fn, args)
    got = refusal(torch.compile(fn, backend="lenz", dynamic=dynamic), args)
    assert wanted is not None, "eager takes it"
    assert got is not None, f"no error, but in eager {wanted!r}"
    if type(got) is not type(wanted):  # torch itself has refused to trace it
        traced = refusal(torch.compile(fn, backend="aot_eager", dynamic=dynamic), args)
        assert type(got) is type(traced), f"{got!r} and not {wanted!r}"
    assert "a bug in lenz" not in str(got)


@pytest.mark.filterwarnings("error:lenz")
@pytest.mark.parametrize("fn", (torch.special.ndtr, lambda x: torch.lgamma(x).real + 1))
def test_types_of_what_has_no_elements_are_checked(fn: Any) -> None:
    """Nothing reads the call's result, since it has no elements."""
    x = torch.empty(0, 3, dtype=torch.complex64)
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'"):
        fn(x)
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'"):
        torch.compile(fn, backend="lenz")(x)


def test_what_eager_takes_is_compiled() -> None:
    """What the rules do not mean stays native: promotions, half types beside f32, out= that fit."""

    def fn(x: Tensor, i: Tensor, b: Tensor, h: Tensor, w: Tensor, out: Tensor) -> Any:
        torch.add(x, 1, out=out)
        norm = F.layer_norm(h, (4,), w, w)
        return norm, x - i, i - 1, b * 2, 2**b, torch.where(b, x, 0).clamp(0, 1), b.clamp(0, 2), out

    args = [rand(4), torch.arange(4), tensor([True, False, True, True]), rand(3, 4).bfloat16(),
            rand(4), torch.empty(4)]  # fmt: skip
    report = lenz.explain(fn)(*args)
    assert not [e.op for g in report.graphs for e in g.externs]
    torch.testing.assert_close(report.result, fn(*args))


NUMBER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "gather": lambda x, i, y: x.gather(-1, i),
    "scatter": lambda x, i, y: x.scatter(0, i, y),
    "scatter of a number": lambda x, i, y: x.scatter(0, i, 1.5),
    "scatter_add": lambda x, i, y: x.scatter_add(-1, i, y),
    "scatter_reduce": lambda x, i, y: x.scatter_reduce(0, i, y, "mean"),
    "index_select": lambda x, i, y: x.index_select(0, i),
    "index_fill": lambda x, i, y: x.index_fill(0, i, 1.5),
    "index_copy": lambda x, i, y: x.index_copy(-1, i, y),
    "index_add": lambda x, i, y: x.index_add(0, i, y, alpha=3),
    "index_reduce": lambda x, i, y: x.index_reduce(0, i, y, "amax"),
    "put": lambda x, i, y: x.put(i, y),
}


@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager", "ignore:index_reduce")
@pytest.mark.parametrize("name", NUMBER)
def test_a_scalar_has_places_as_in_eager(name: str) -> None:
    """Native where each argument has one element; where eager raises, so does lenz."""
    for at, of in itertools.product([(), (1,), (2,), (0,), (1, 1)], repeat=2):
        args = tensor(3.0), torch.zeros(at, dtype=I64), torch.full(of, 2.0)
        wanted = refusal(NUMBER[name], args)
        torch._dynamo.reset()
        if wanted is not None:
            assert refusal(torch.compile(NUMBER[name], backend="lenz"), args) is not None, (at, of)
            continue
        report = lenz.explain(NUMBER[name])(*args)
        torch.testing.assert_close(report.result, NUMBER[name](*args), rtol=0, atol=0)
        if at == of == ():
            assert not [e.op for g in report.graphs for e in g.externs]


@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager", "ignore:index_reduce")
@pytest.mark.parametrize("place", (-2, -1, 1, 99))
@pytest.mark.parametrize("name", NUMBER)
def test_places_of_a_scalar_are_checked(name: str, place: int) -> None:
    shape = () if "index" in name else (1,)
    args = tensor(3.0), torch.full((1,), place), torch.full(shape, 2.0)
    wanted = refusal(NUMBER[name], args)
    got = refusal(torch.compile(NUMBER[name], backend="lenz"), args)
    assert type(got) is type(wanted), (got, wanted)


LATER: dict[str, tuple[Callable[..., Any], list[tuple[Tensor, ...]]]] = {
    "index_reduce": (
        lambda x: x.index_reduce(0, torch.arange(4) // 2, x, "amax"), [(rand(4),), (rand(6),)],
    ),
    "slice_scatter": (
        lambda x, y: x.slice_scatter(y, 0, 0, 4),
        [(rand(6), rand(4)), (rand(6), rand(5)), (rand(3), rand(4))],
    ),
    "select_scatter": (
        lambda x, y: x.select_scatter(y, 0, 2), [(rand(6, 3), rand(3)), (rand(2, 3), rand(3))],
    ),
    "diagonal_scatter": (
        lambda x, y: x.diagonal_scatter(y), [(rand(6, 4), rand(4)), (rand(3, 4), rand(4))],
    ),
    "addmv": (torch.addmv, [(rand(4), rand(4, 3), rand(3)), (rand(4), rand(1, 3), rand(3))]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", LATER)
def test_a_later_call_is_refused_as_well(name: str) -> None:
    """Sizes that fit in the first call alone must not be taken for granted in the graph."""
    fn, (fits, *others) = LATER[name]
    torch._dynamo.reset()
    run = torch.compile(fn, backend="lenz", dynamic=True)
    torch.testing.assert_close(run(*fits), fn(*fits))
    for args in others:
        want, got = error_of(fn, args), error_of(run, args)
        assert want is not None and got is not None, [a.shape for a in args]


def test_writes_to_parts_of_unknown_size_are_compiled() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        x[1:, ::2].add_(1)
        x[3] = 2
        x.diagonal(1).zero_()
        x[: y.shape[0]] = y
        return x

    args = rand(8, 10), rand(4, 10)
    report = lenz.explain(fn, dynamic=True)(*args)
    assert not [e.op for g in report.graphs for e in g.externs]
    torch.testing.assert_close(report.result, fn(*args))
