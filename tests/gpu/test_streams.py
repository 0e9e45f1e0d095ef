"""Streams, threads, CUDA graphs and memory: launches go where torch's own would go."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

# Clock cycles for which the device is kept busy; some 50 ms.
LONG = 100_000_000


def chain(x: Tensor, w: Tensor) -> Tensor:
    """Kernels around a library call."""
    return F.gelu(x.softmax(-1) @ w).sum(-1) + x.mean(-1)


def late(stream: torch.cuda.Stream, into: Tensor, values: Tensor) -> None:
    """On `stream`, after a long wait, store `values`: other streams see the old ones until then."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        into.copy_(values)


def test_a_call_on_a_side_stream_waits_for_that_stream_only(cuda: str) -> None:
    run = torch.compile(chain, backend="lenz")
    x, w, values = (randn(64, 64, device=cuda) for _ in range(3))
    run(x, w)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late(stream, x, values)
    with torch.cuda.stream(stream):
        got = run(x, w)
    stream.synchronize()
    torch.testing.assert_close(got, chain(values, w), rtol=1e-4, atol=1e-4)


def test_compiling_on_a_side_stream(cuda: str) -> None:
    stream = torch.cuda.Stream()
    x, w, values = (randn(64, 64, device=cuda) for _ in range(3))
    torch.cuda.synchronize()
    late(stream, x, values)
    with torch.cuda.stream(stream):
        got = torch.compile(chain, backend="lenz")(x, w)
    stream.synchronize()
    torch.testing.assert_close(got, chain(values, w), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.compile(chain, backend="lenz")(x, w), chain(x, w))


def test_a_call_does_not_wait_for_the_device(cuda: str) -> None:
    run = torch.compile(lambda x: (x * 2 + 1).relu().sum(-1), backend="lenz")
    x = randn(64, 64, device=cuda)
    run(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * LONG)
    busy = torch.cuda.Event()
    busy.record()
    run(x)
    assert not busy.query(), "the host waited for the device"
    torch.cuda.synchronize()


def test_backward_runs_on_the_stream_of_forward(cuda: str) -> None:
    run = torch.compile(chain, backend="lenz")
    x, w = (randn(64, 64, device=cuda).requires_grad_() for _ in range(2))
    run(x, w).sum().backward()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    late(stream, x.detach(), randn(64, 64, device=cuda))
    with torch.cuda.stream(stream):
        got = torch.autograd.grad(run(x, w).sum(), (x, w))
    stream.synchronize()
    want = torch.autograd.grad(chain(x, w).sum(), (x, w))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_backward_in_another_thread(device: str) -> None:
    run = torch.compile(chain, backend="lenz")
    x, w = (randn(32, 32, device=device).requires_grad_() for _ in range(2))
    want = torch.autograd.grad(chain(x, w).sum(), (x, w))
    with ThreadPoolExecutor(1) as pool:
        out = run(x, w).sum()
        got = pool.submit(torch.autograd.grad, out, (x, w)).result()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("graphs", ("off", "on"))
def test_a_thread_that_has_not_called_cuda_yet(cuda: str, graphs: str) -> None:
    """Its memory comes from the cache, so the kernel's launch is its first call of the driver."""
    run = torch.compile(lambda x: x.sin() * 2, backend="lenz", options={"cuda_graphs": graphs})
    x = randn(1 << 16, device=cuda)
    want = x.sin() * 2
    for _ in range(4):
        run(x)
    torch.cuda.synchronize()
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            torch.testing.assert_close(pool.submit(run, x).result(), want)


def test_threads_with_streams_of_their_own(cuda: str) -> None:
    run = torch.compile(chain, backend="lenz")
    w = randn(64, 64, device=cuda)
    run(w, w)
    inputs = [randn(64, 64, device=cuda) for _ in range(8)]
    torch.cuda.synchronize()

    def one(x: Tensor) -> Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                out = run(x, w)
            stream.synchronize()
        return out

    with ThreadPoolExecutor(4) as pool:
        for x, got in zip(inputs, pool.map(one, inputs), strict=True):
            torch.testing.assert_close(got, chain(x, w), rtol=1e-4, atol=1e-4)


def test_a_user_captures_a_compiled_call_in_a_cuda_graph(cuda: str) -> None:
    run = torch.compile(chain, backend="lenz")
    x, w = randn(64, 64, device=cuda), randn(64, 64, device=cuda)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as CUDA graphs ask: libraries set themselves up before capture
        for _ in range(3):
            run(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, w)
    for _ in range(2):
        x.copy_(randn(64, 64, device=cuda))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, chain(x, w), rtol=1e-4, atol=1e-4)


def inference() -> Callable[[], Any]:
    """A call that makes results of several sizes."""
    run = torch.compile(chain, backend="lenz")
    x, w = randn(512, 512, device="cuda"), randn(512, 512, device="cuda")
    return lambda: run(x, w)


def training() -> Callable[[], Any]:
    """A step of training."""
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 8))
    model = model.cuda()
    run = torch.compile(model, backend="lenz")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = randn(128, 256, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.dropout(run(x), 0.1).square().mean().backward()
        optimizer.step()

    return step


def changing() -> Callable[[], Any]:
    """Sizes that change from call to call."""
    run = torch.compile(chain, backend="lenz", dynamic=True)
    w = randn(64, 64, device="cuda")
    sizes = iter([*range(2, 60)] * 10)
    return lambda: run(randn(next(sizes), 64, device="cuda"), w)


@pytest.mark.parametrize("make", (inference, training, changing))
def test_memory_does_not_grow_over_a_hundred_calls(make: Any, cuda: str) -> None:
    call = make()
    for _ in range(60):
        call()

    def held() -> int:
        for _ in range(2):  # what finalizers of earlier tests let go
            gc.collect()
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # the allocator frees what other streams have used
        return torch.cuda.memory_allocated()

    before, reserved = held(), torch.cuda.memory_reserved()
    for _ in range(100):
        call()
    assert held() == before, f"{held() - before} bytes are held after 100 calls"
    assert torch.cuda.memory_reserved() <= reserved


def test_arguments_are_freed_when_a_plan_is_done_with_them(cuda: str) -> None:
    """A chain of large values needs two at a time, not all."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(6):
            x = (x @ w).relu()
        return x

    run = torch.compile(f, backend="lenz")
    x, w = randn(4096, 1024, device=cuda), randn(1024, 1024, device=cuda)
    with torch.no_grad():
        run(x, w)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(x, w)
        torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    size = x.numel() * x.element_size()
    # Two values, and a workspace of the matrix library.
    assert most <= 2 * size + (4 << 20), f"{most / size:.1f} values at a time"


def test_launches_from_threads_keep_their_arguments(cuda: str) -> None:
    run = torch.compile(lambda x: x * 2 + 1, backend="lenz")
    given = [torch.full((4096,), float(k), device=cuda) for k in range(8)]
    run(given[0])

    def work(k: int) -> bool:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            got = [run(given[k]) for _ in range(20_000)][-100:]
        stream.synchronize()
        return all(torch.equal(r, given[k] * 2 + 1) for r in got)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8))), "a launch had the pointers of another thread"
    finally:
        sys.setswitchinterval(before)


@pytest.mark.slow
def test_many_calls_by_threads_on_two_streams(cuda: str) -> None:
    """100,000 calls of one graph by 8 threads: each gets its own results, to the bit."""
    run, w = torch.compile(chain, backend="lenz"), randn(64, 64, device=cuda)
    run(randn(64, 64, device=cuda), w)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]

    def work(k: int) -> int:
        with torch.cuda.stream(streams[k % 2]):
            x = randn(64, 64, device=cuda, generator=torch.Generator(cuda).manual_seed(k))
            want = run(x, w)
            torch.testing.assert_close(want, chain(x, w), rtol=1e-4, atol=1e-4)
            off = torch.zeros((), device=cuda)
            for _ in range(125):
                results = [run(x, w) for _ in range(100)]
                off += sum((r != want).sum() for r in results)
            return int(off)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [0] * 8
