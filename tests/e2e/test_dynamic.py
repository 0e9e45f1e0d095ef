"""One compilation for all sizes: 0 and 1, other strides and offsets, sizes that data decides."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn

from tests.e2e.sides import same

Sized = Callable[[int], tuple[Any, ...]]
DATA = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


def serves(
    fn: Callable[..., Any], make: Sized, sizes: Iterable[int], strides: bool = True, **kwargs: Any
) -> None:
    """Assert eager's results, strides, gradients and writes for each size in turn."""
    torch._dynamo.reset()
    run = torch.compile(fn, backend="lenz", **kwargs)
    for n in sizes:
        torch.manual_seed(n)
        ours = make(n)
        torch.manual_seed(n)
        theirs = make(n)
        results = run(*ours), fn(*theirs)
        same(*results, 1e-4, strides)
        same([t.detach() for t in ours if isinstance(t, Tensor)],
             [t.detach() for t in theirs if isinstance(t, Tensor)], 1e-4, True)  # fmt: skip
        if isinstance(results[0], Tensor) and results[0].requires_grad:
            for r in results:
                (r * torch.linspace(1, 2, r.numel()).view(r.shape)).sum().backward()
            same([t.grad for t in ours], [t.grad for t in theirs], 1e-3, True)


def half(x: Tensor) -> Any:
    n = x.shape[0]
    return (
        x[: n // 2] * 2,
        x[-3:].flip(0),
        x.new_zeros(n + 1, 2).index_fill(0, x.new_ones(1).long(), 1),
    )


def by_shape(x: Tensor) -> Tensor:
    return x.view(2, -1).sum(1) if x.shape[0] % 2 == 0 else x * 2


SIZES = (5, 9, 33, 130, 1, 0, 2, 4097)
STATIC: dict[str, tuple[Callable[..., Any], Sized, tuple[int, ...]]] = {
    "numbers": (lambda x: x * x.shape[0] + x.numel() / 3.0, lambda n: (randn(n, 7),), SIZES),
    "roots": (lambda x: x / (x.shape[0] ** 0.5 + 1), lambda n: (randn(n),), SIZES),
    "returned": (lambda x: (x * 2, x.shape[0] * 2 + 1), lambda n: (randn(n, 7),), SIZES),
    "parts": (half, lambda n: (randn(n, 7),), (5, 9, 33, 130, 3, 64)),
    "strides": (lambda x: (x + 1, x.sum(0)), lambda n: (randn(n + 1, 9)[:n, 1:6].t(),), SIZES),
    "offsets": (lambda x: x[2:].add_(1), lambda n: (randn(n + 4)[1:],), SIZES),
    "zero strides": (lambda x: x * 2 + 1, lambda n: (randn(n, 1).expand(n, 5),), (5, 9, 2)),
    "divisors": (by_shape, lambda n: (randn(n),), (8, 16, 9, 64, 7)),
    "gradients": (
        lambda x, w: F.layer_norm(x @ w, (5,)).softmax(-1),
        lambda n: (randn(n, 7, requires_grad=True), randn(7, 5, requires_grad=True)),
        (5, 9, 130, 1, 2),
    ),
    "channels last": (
        lambda x: x.relu() * 2,
        lambda n: (randn(2, 3, n, n).to(memory_format=torch.channels_last),),
        (5, 9, 33, 2),
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", STATIC)
def test_sizes_of_arguments(name: str) -> None:
    fn, make, sizes = STATIC[name]
    serves(fn, make, sizes, dynamic=True)
    serves(fn, make, sizes)


def floats(x: Tensor) -> Any:
    n = x.shape[0]
    y = x[: int(n * 0.5)].cumsum(0), torch.zeros(int(n**0.5) + 1).cos()
    return *y, F.interpolate(x[None, None], size=(n * 2, 7), mode="bilinear")


@pytest.mark.filterwarnings("error:.*in eager.*")
def test_numbers_made_from_sizes_that_are_no_integers() -> None:
    serves(floats, lambda n: (randn(n, 5),), (5, 9, 33, 4), dynamic=True)
    with torch._dynamo.config.patch(DATA):
        fn = lambda x, y: (x[0].item(), (y * x[1].item()).clamp(max=x[0].item()) + 1)
        serves(fn, lambda n: (torch.tensor([n + 0.5, 4]), randn(5)), (5, 9))
        serves(fn, lambda n: (torch.tensor([n > 5, True]), randn(5)), (5, 9))


@pytest.mark.filterwarnings("error:lenz")
def test_rounded_quotients_of_sizes() -> None:
    def fn(x: Tensor) -> tuple[Any, ...]:
        n, m = x.shape
        return x * round(n * 0.3), round(n / m), x.sum(0) * round(n * 0.3, 1)

    serves(fn, lambda n: (randn(n, 7),), (5, 9, 33, 3, 2), dynamic=True)


def test_numbers_beyond_64_bits() -> None:
    """Python's integers do not wrap."""

    def fn(x: Tensor, n: int, m: int) -> tuple[Any, ...]:
        return x + 1, n * 2, n * n, n - 2**62 - 2**62, n // 3 * m, n * m % 7, x.shape[0] * n

    run = torch.compile(fn, backend="lenz", dynamic=True)
    for n in (3, 2**31, -(2**40), 2**62, -(2**62), 5):
        for m in (2, -(2**33), 2**62):
            assert run(randn(4), n, m)[1:] == fn(randn(4), n, m)[1:]


USES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "scaled": lambda x, n: x * (n * n),
    "plain": lambda x, n: x * n,
    "negated": lambda x, n: x * -n,
    "compared": lambda x, n: x > n * n,
    "divided": lambda x, n: x * (n * n // 7),
    "a fraction": lambda x, n: x * (n * n / 7),
    "a remainder": lambda x, n: x + n * n % 1000003,
    "a sum": lambda x, n: x * (n + n),
    "filled": lambda x, n: torch.full((3,), n * n, dtype=torch.float32) + x,
    "the larger one": lambda x, n: x * max(n * n, 3),
}


@pytest.mark.diagonal(2)
@pytest.mark.filterwarnings("ignore::UserWarning")  # they run in eager
@pytest.mark.parametrize("use", USES)
def test_kernels_with_numbers_beyond_64_bits(use: str) -> None:
    run = torch.compile(USES[use], backend="lenz", dynamic=True)
    for n in (5, -7, 4_000_000_000, 2**62 + 2**40, -(2**63), 2**63, 9):
        x = torch.ones(3)
        try:
            want = USES[use](x, n)
        except (OverflowError, RuntimeError) as e:
            with pytest.raises(type(e)):
                run(x, n)
        else:
            torch.testing.assert_close(run(x, n), want)


def test_numbers_of_tensors_beyond_64_bits() -> None:
    run = torch.compile(lambda x, i: x * (i.item() * i.item()), backend="lenz", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert run(torch.ones(1), torch.tensor(2**31 - 1)) == float((2**31 - 1) ** 2)
        with pytest.raises(RuntimeError, match="might not fit in 64 bits"):
            run(torch.ones(1), torch.tensor(2**31))


OF_SIZES: dict[str, Callable[[Tensor, int], Any]] = {
    "a power": lambda x, n: (x + 1, n**30),
    "a shape": lambda x, n: torch.arange(n**20 % 7 + 1),
    "repeated": lambda x, n: x.repeat(n**20 % 7 + 1),
    "in a kernel": lambda x, n: x + n**20 % 1000007,
    "a float": lambda x, n: x * (n**30 / 7),
    "a shift": lambda x, n: (x + 1, n << 62),
    "a sum": lambda x, n: (x + 1, n + 10**25),
    "a constant": lambda x, n: (x + 1, n * 3 % 2**64),
    "a generator": lambda x, n: (x + 1, (n * 6364136223846793005 + 1442695040888963407) % 2**64),
    "a product": lambda x, n: (x + 1, n**5 * x.numel()),
}


@pytest.mark.diagonal(2)
@pytest.mark.filterwarnings("ignore:.*in eager.*")  # of the largest
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("name", OF_SIZES)
def test_numbers_of_sizes_beyond_64_bits(name: str, data: bool) -> None:
    """Memory bounds sizes, but not their powers. Data may decide the sizes."""
    fn = lambda x: OF_SIZES[name](x, x[x > 0].shape[0] if data else x.shape[0])
    run = torch.compile(fn, backend="lenz", dynamic=True)
    with torch._dynamo.config.patch(DATA):
        for n in (10, 5, 7000):
            try:
                same(run(torch.ones(n)), fn(torch.ones(n)), 1e-4, True)
            except RuntimeError as e:  # of an assertion
                assert data, e
                assert "might not fit in 64 bits" in str(e)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_numbers_without_a_bound_are_eagers() -> None:
    fn = lambda x, i: x * (i.item() // 2.5)
    run = torch.compile(fn, backend="lenz")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for n in (7, -9, 2**40):
            assert run(torch.ones(1), torch.tensor(n)) == fn(torch.ones(1), torch.tensor(n))


@pytest.mark.parametrize("whole", [int, math.floor, math.ceil, round])
def test_numbers_of_floats_beyond_64_bits(whole: Callable[[float], int]) -> None:
    run = torch.compile(lambda x, y: x * whole(y.item()), backend="lenz", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert run(torch.ones(1), torch.tensor(-3.7)) == whole(-3.7)
        with pytest.raises(RuntimeError, match="might not fit in 64 bits"):
            run(torch.ones(1), torch.tensor(1e20))


def test_unsigned_numbers_of_tensors_beyond_64_bits() -> None:
    run = torch.compile(lambda x, i, j: (x * i.item(), j.item()), backend="lenz", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        most, beyond = torch.tensor([2**63 - 1, 2**63], dtype=torch.uint64).unbind()
        x, n = run(torch.ones(1), most, beyond)
        assert x == 2.0**63 and n == 2**63
        with pytest.raises(RuntimeError, match="might not fit in 64 bits"):
            run(torch.ones(1), beyond, most)


DIVIDED: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "in a kernel": (lambda x, n: x + 24 // (n - 3), lambda n: (bits(2), n)),
    "as a result": (lambda x, n: (x + 1, 24 // (n - 3)), lambda n: (bits(2), n)),
    "remainder": (lambda x, n, m: x + n % m, lambda n: (bits(2), n + 4, n - 3)),
    "of data": (lambda x, t: (x, 24 % t.item()), lambda n: (bits(2), torch.tensor(n - 3))),
    "chosen": (lambda x: x + 10 // x[x > 0].shape[0], lambda n: (bits(n - 3),)),
    "filled": (lambda t: torch.full((3,), 24 // t.item()), lambda n: (torch.tensor(n - 3),)),
    "size": (
        lambda t: torch.zeros(24 // (t[0].item() - t[1].item())) + t.sum(),
        lambda n: (torch.tensor([n, 3]),),
    ),
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", DIVIDED)
def test_a_divisor_of_0_raises_pythons_error(name: str, native: bool) -> None:
    fn, make = DIVIDED[name]
    run = torch.compile(fn, backend="lenz", options={"on_error": "raise", "native": native})
    with torch._dynamo.config.patch(DATA):
        for n in (9, 11, 3, 7):
            try:
                want = fn(*make(n))
            except ZeroDivisionError as e:
                with pytest.raises(ZeroDivisionError, match=str(e)):
                    run(*make(n))
            else:
                same(run(*make(n)), want, 0, True)


FLOATS: dict[str, tuple[Callable[[Tensor, int], Tensor], int]] = {
    "root": (lambda x, n: x.sum() + math.sqrt(n), 3),
    "logarithm": (lambda x, n: x.sum() + math.log2(n), 3),
    "power": (lambda x, n: x.sum() + n**-1, 5),
    "quotient": (lambda x, n: x.sum() + 2.0 / n, 5),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_sizes_raise_pythons_errors(name: str) -> None:
    """torch computes them as tensors. A call outside of the domain is traced again, and fails."""
    made, bad = FLOATS[name]
    fn = lambda x: made(x, x.shape[0] - 5)
    run = torch.compile(fn, backend="lenz", dynamic=True, options={"on_error": "raise"})
    for n in (9, 12, 7):
        torch.testing.assert_close(run(torch.ones(n)), fn(torch.ones(n)))
    with pytest.raises((ValueError, ZeroDivisionError)) as told:
        fn(torch.ones(bad))
    with pytest.raises(RuntimeError, match=str(told.value)):
        run(torch.ones(bad))


EXPANDED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "before": lambda n, w, m: (lambda k: (w * 2).expand(k, 64) @ m)(n.sum().item()),
    "after": lambda n, w, m: (w * 2).expand(n.sum().item(), 64) @ m,
    "gradient": lambda n, w, m: w[w > 0].sum() / w[w > 0].shape[0],
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", EXPANDED)
def test_expanded_values_that_are_empty(name: str, native: bool) -> None:
    """Their memory is not empty, and is there before the size is read."""

    def make(n: int) -> tuple[Tensor, ...]:
        w, m = randn(64).abs() * (n or -1), randn(64, 64)
        return torch.tensor([n, 0]), w.requires_grad_(), m

    with torch._dynamo.config.patch(DATA):
        serves(EXPANDED[name], make, (3, 0), options={"on_error": "raise", "native": native})


def test_a_branch_on_a_size() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] > 10, lambda a: a * 2, lambda a: a * 3, (x,)) + 1

    serves(fn, lambda n: (randn(n),), (20, 7, 11, 10), dynamic=True)


@pytest.mark.parametrize("native", [True, False])
def test_a_branch_on_a_size_in_training(native: bool) -> None:
    """Its truth is an argument of the backward graph."""

    def fn(x: Tensor) -> Tensor:
        is_large = (x.shape[0] > 4) & (x.shape[1] > 2)
        return torch.cond(is_large, lambda a: (a * 2).sin(), torch.cos, (x,)).exp()

    run = torch.compile(fn, backend="lenz", dynamic=True, options={"native": native})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lenz runs a graph in eager")
        for shape in ((5, 4), (3, 4), (7, 2), (7, 5)):
            got, want = (randn(*shape).requires_grad_() for _ in range(2))
            want.data = got.detach().clone()
            run(got).sum().backward()
            fn(want).sum().backward()
            torch.testing.assert_close(got.grad, want.grad)


def bits(n: int) -> Tensor:
    return torch.tensor([1.0] * n + [0.0] * 4)


def late_sizes(x: Tensor, y: Tensor) -> Any:
    """Kernels before the call that finds a size out, and kernels behind it over the same loops."""
    a = y.sin()
    n = int(x.sum().long())
    torch._check(n >= 0)
    torch._check(n < 100)
    found = x.nonzero()
    total = torch.zeros(found.shape[0]) + a.sum()
    return a * n, a + 1, torch.arange(n) * 2 + a[0, 0], total, a * found.shape[0]


def cut(x: Tensor, y: Tensor) -> Any:
    return [part * 2 for part in torch.split(y, [*x.sum().long().view(1).tolist(), 4])]


BY_DATA: dict[str, tuple[Callable[..., Any], bool]] = {
    "late": (late_sizes, False),
    "mask": (lambda x, y: (y[x > 0], y[x > 0].relu() + 1, y[x > 0].t().contiguous()), False),
    "scalar": (lambda x, y: y * x[0].item() + 1, False),
    "split": (cut, False),
    "unique": (lambda x, y: torch.unique(x, return_inverse=True, return_counts=True), False),
    "select": (lambda x, y: y[:, 0].masked_select(x > 0).sin(), True),
    "repeat": (lambda x, y: y.repeat_interleave(x.long() + 1, 0) * 2, True),
    "product": (lambda x, y: y[x > 0] @ y.t(), True),
}


@pytest.mark.filterwarnings("ignore:.*in eager.*")
@pytest.mark.parametrize("name", BY_DATA)
def test_sizes_that_data_decides(name: str) -> None:
    fn, grad = BY_DATA[name]
    with torch._dynamo.config.patch(DATA):
        make = lambda n: (bits(n), randn(n + 4, 3, requires_grad=grad))
        # No trace knows that data makes a size 1, where eager's `contiguous` has nothing to copy:
        # aot_eager has other strides there too.
        serves(fn, make, (5, 0, 7), fullgraph=True)
        serves(fn, make, (1,), name != "mask", fullgraph=True)


def count_of(x: Tensor) -> Any:
    n = x.sum().long().item()
    torch._check(n >= 0)
    torch._check(n < 100)
    return n


SUMS: dict[str, Callable[..., Any]] = {
    "rows": lambda x, y: torch.cat([y, torch.zeros(count_of(x), 3)]),
    "columns": lambda x, y: torch.cat([y.t(), torch.zeros(3, count_of(x))], 1).sin(),
    "pad": lambda x, y: F.pad(y, (count_of(x), 1)).softmax(1),
    "two": lambda x, y: torch.cat(
        [y, torch.zeros(count_of(x), 3), y.new_zeros(count_of(x[:1]), 3)]
    ),
    "twice": lambda x, y: torch.cat([torch.cat([y, torch.zeros(count_of(x), 3)]) * 2] * 2),
    "number": lambda x, y: torch.addcmul(y, y, y, value=x.sum().item()),
    "slope": lambda x, y: F.leaky_relu(y.sin(), x.sum().item()) * 2,
    "conjugate": lambda x, y: torch.view_as_real(
        torch.view_as_complex(F.pad(y, (0, 1))[x > 0].view(-1, 2, 2)) * 2j
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_gradients_whose_size_data_decides(name: str) -> None:
    """The backward half finds u0 + 4 rows and u0 nowhere else; it takes numbers as floats."""
    with torch._dynamo.config.patch(DATA):
        make = lambda n: (bits(n), randn(n + 4, 3, requires_grad=True))
        serves(SUMS[name], make, (5, 0, 7, 1), fullgraph=True, options={"on_error": "raise"})


def test_sizes_that_are_rounded_numbers() -> None:
    def f(x: Tensor) -> Tensor:
        ones = torch.ones(round(x.shape[0] / 3)), torch.ones(math.ceil(x.shape[0] / 4) * 4)
        return torch.cat([part * x.sum() for part in ones])

    run = torch.compile(f, backend="lenz", dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `round` is left to eager, which is said
        for n in (12, 13, 30):
            x = torch.randn(n)
            torch.testing.assert_close(run(x), f(x))


def test_ranges_whose_guards_torch_loses() -> None:
    """A graph traced for 3 columns of a written base serves 5 of them (torch_lost_guards.py)."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.view(-1)[::3].fill_(1)
        return b @ b.t()

    def bases(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1, n), torch.zeros(1, n)

    compiled = torch.compile(f, backend="lenz", dynamic=True)
    for n in (5, 3, 5, 7):
        ours, theirs = bases(n)
        compiled(ours, ours[:, 1:])
        f(theirs, theirs[:, 1:])
        assert torch.equal(ours, theirs), n


WRAPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda x: x.roll(3, 1),
    "roll back": lambda x: x.roll(-5, 1),
    "roll far": lambda x: x.roll(1000, 1),
    "roll all": lambda x: x.roll(-40),
    "rolls": lambda x: x.roll(3, 1) + x.roll(-7, 1) * x.roll(40, 1),
    "repeat": lambda x: x.repeat(1, 3) + 1,
    "repeat both": lambda x: x.repeat(2, 40),
    "part": lambda x: x[:, :100].repeat(1, 20),
    "positions": lambda x: x + torch.arange(x.shape[1]) % 48,
    "flat": lambda x: x[:, : x.shape[1] // 2].reshape(-1),
    "largest": lambda x: x.roll(3, 1).amax(1) if x.numel() else x,
    "place": lambda x: x.roll(3, 1).argmax(1) if x.numel() else x,
    "sum": lambda x: (x.roll(3, 1).round().long() * x.repeat(1, 2)[:, ::2].round().long()).sum(1),
}


@pytest.mark.parametrize("dynamic", (True, False))
@pytest.mark.parametrize("name", WRAPPED)
def test_an_index_that_wraps_around_gives_the_same_bits(name: str, dynamic: bool) -> None:
    """One loop per period: parts at both ends, blocks of 4096, periods shorter than a vector."""
    run = torch.compile(WRAPPED[name], backend="lenz", dynamic=dynamic)
    for n in (130, 0, 1, 2, 3, 16, 31, 97, 4097, 9001) if dynamic else (37, 2, 4099):
        x = torch.randn(3, n)
        got, want = run(x), WRAPPED[name](x)
        assert got.dtype is want.dtype and torch.equal(got, want), f"{name} of rows of {n}"


SIZED: dict[str, Callable[[int, int], Tensor]] = {
    "zeros": lambda n, m: torch.zeros(n, m),
    "three": lambda n, m: torch.zeros(2, n, m),
    "repeated": lambda n, m: torch.ones(2, 3).repeat(n, m),
    "part": lambda n, m: torch.ones(6, 7)[:, :n].contiguous(),
    "padded": lambda n, m: F.pad(torch.ones(2, 3, 3), (0, 0, n, m)),
    "product": lambda n, m: torch.matmul(torch.ones(2, n, 3), torch.ones(3, m)),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda x: x.view(-1),
    "pairs": lambda x: x.flatten(0, 1),
    "rows": lambda x: x.view(x.shape[0], -1),
    "first": lambda x: x[:1].view(-1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("make", SIZED)
def test_views_of_results_whose_sizes_may_be_0(make: str, view: str) -> None:
    """Their strides are made of max(1, size). A map in place of a view would not share writes."""

    def f(n: int, m: int) -> tuple[Tensor, Tensor]:
        x = SIZED[make](n, m)
        return x, VIEWS[view](x)

    torch._dynamo.reset()
    run = torch.compile(f, backend="lenz", dynamic=True)
    for sizes in ((4, 5), (6, 3), (1, 3)):
        x, y = run(*sizes)
        same((x, y), f(*sizes), 1e-5, True)
        y.fill_(7.0)
        assert (x == 7.0).sum() == y.numel()


@pytest.mark.parametrize("rows", [1, 3])
def test_norms_of_an_order_that_is_an_argument(rows: int) -> None:
    """Of one element, all norms are its absolute value but that of order 0."""

    def f(x: Tensor, p: int) -> Tensor:
        return torch.linalg.vector_norm(x, p, dim=0)

    x = randn(rows, 2)
    run = torch.compile(f, backend="lenz")
    for p in (3, 2, 0, 1, 4):
        same(run(x, p), f(x, p), 1e-5, True)
    torch._dynamo.reset()
    same(torch.compile(f, backend="lenz", dynamic=True)(x, 0), f(x, 0), 1e-5, True)
