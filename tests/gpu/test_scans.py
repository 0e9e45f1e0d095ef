"""Rows that several programs scan: right, with the same bits on every run, on any stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lenz

LARGE = 1 << 26
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def through(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="lenz", **options)


def values(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if not dtype.is_floating_point:
        return torch.randint(-(2**30), 2**30, shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype)


def chosen(mask: Tensor, source: Tensor) -> Tensor:
    """A scan that feeds an index."""
    return source[(mask.long().cumsum(0) - 1).clamp(min=0)]


def close(got: Tensor, x: Tensor, dim: int) -> None:
    """Beside sums in f64 (of integers: exact), to what so many roundings of f32 may add up to."""
    if not x.dtype.is_floating_point:
        assert torch.equal(got, x.cumsum(dim))
        return
    want = x.double().cumsum(dim)
    error = (got.double() - want).abs()
    least = 1e-5 * want.abs().amax()
    assert bool((error <= least + 2 * torch.finfo(x.dtype).eps * want.abs()).all()), error.max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((LARGE,), 0), ((10, 131072), 1), ((4, 1 << 20), 1), ((1 << 18, 33), 0), ((3, 40_001, 5), 1)],
    ids=str,
)
def test_sums_of_long_rows(shape: tuple[int, ...], dim: int, dtype: torch.dtype, cuda: str) -> None:
    x = values(shape, dtype, cuda)
    report = lenz.explain(lambda x: x.cumsum(dim))(x)
    assert [k.kind for g in report.graphs for k in g.kernels] == ["split_scan"]
    close(report.result, x, dim)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_run_has_the_same_bits(dtype: torch.dtype, cuda: str) -> None:
    """Other work on the card changes who is first, and nothing else."""
    x = values((LARGE,), dtype, cuda)
    run = through(lambda x: x.cumsum(0))
    first, noise = run(x), torch.randn(1 << 20, device=cuda)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for k in range(100):
        if k % 2:
            with torch.cuda.stream(side):
                noise.mul_(1.0001)
        assert torch.equal(run(x), first), f"call {k}"


def test_two_streams_at_once(cuda: str) -> None:
    """Each launch has words of its own; programs of two launches share the card."""
    run = through(lambda x: x.cumsum(-1))
    xs = [torch.randn(3, LARGE // 8, device=cuda) for _ in range(2)]
    want = [run(x) for x in xs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    got: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[k].append(run(xs[k]))
    torch.cuda.synchronize()
    for k in range(2):
        assert all(torch.equal(y, want[k]) for y in got[k])


def test_kinds_and_chains(cuda: str) -> None:
    x = torch.randn(2, 1 << 20, device=cuda)
    for fn in (
        lambda x: x.cummax(-1),
        lambda x: x.cummin(-1),
        lambda x: x.logcumsumexp(-1),
        lambda x: (x.sin() * 1e-6 + 1).cumprod(-1),
        lambda x: x.flip(-1).cumsum(-1).flip(-1),
        # In f32 the roundings of a million products would add up to what is compared.
        lambda x: ((x.double() * 1e-7 + 1).cumprod(-1) + 1e-7).log().cumsum(-1),
        lambda x: x.double().cumsum(-1),
        lambda x: (x.softmax(-1), (x > 1).long().cumsum(-1)),
    ):
        got, want = through(fn)(x), fn(x)
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_rows_of_unknown_length(cuda: str) -> None:
    run, sums = through(chosen, dynamic=True), through(lambda x: x.cumsum(-1), dynamic=True)
    for n in (2, 255, 256, 257, 100_000, 3_000_000):
        mask, source = torch.rand(n, device=cuda) > 0.5, torch.randn(n, device=cuda)
        assert torch.equal(run(mask, source), chosen(mask, source)), n
        x = torch.randint(-9, 9, (3, n), device=cuda)
        assert torch.equal(sums(x), x.cumsum(-1)), n


@pytest.mark.parametrize("kind", ["cumsum", "cummax", "logcumsumexp"])
def test_few_rows_of_unknown_number(kind: str, cuda: str) -> None:
    """The last program has fewer rows than its tile; docs/upstream has what went wrong there."""
    fn = {"cumsum": torch.cumsum, "cummax": torch.cummax, "logcumsumexp": torch.logcumsumexp}[kind]
    run = through(lambda x: fn(x, 1), dynamic=True)  # type: ignore[operator]
    for rows, columns in itertools.product((2, 17, 31, 32, 33, 34, 63, 65, 97), (5, 17, 33, 40)):
        x = torch.randn(rows, columns, device=cuda)
        torch.testing.assert_close(run(x), fn(x, 1), rtol=1e-4, atol=1e-4)  # type: ignore[operator]


def test_a_captured_launch_zeroes_its_workspace(cuda: str) -> None:
    run = through(lambda x: x.cumsum(0))
    x = torch.randn(1 << 20, device=cuda)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        close(out, x, 0)


def test_tuning_chooses_among_parts(cuda: str) -> None:
    x = torch.randint(-9, 9, (1 << 24,), device=cuda)
    for fn, args in ((lambda x: x.cumsum(0), (x,)), (chosen, (x > 0, x))):
        run = through(fn, mode="max-autotune")
        for _ in range(2):
            assert torch.equal(run(*args), fn(*args))
