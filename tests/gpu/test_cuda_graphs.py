"""Plans that CUDA graphs replay: values, lives of results, moving arguments, sizes, threads."""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, randn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lenz import replay
from lenz.machine.cuda import graph as cuda_graph


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, cuda: str) -> Iterator[list[replay.Replayed]]:
    """The plans that graphs may replay, in the order in which they are compiled."""
    found: list[replay.Replayed] = []

    class Noted(replay.Replayed):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(replay, "Replayed", Noted)
    yield found
    found.clear()
    torch._dynamo.reset()
    gc.collect()


def graphed(fn: Callable[..., Any], how: str = "on", **more: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="lenz", options={"cuda_graphs": how, "cache": False}, **more)


def replays(made: list[replay.Replayed]) -> list[int]:
    """How often each plan was replayed."""
    return [sum(m.replays for twins in r.made.values() for m in twins) for r in made]


def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax((x @ w).sin() + x, -1) @ w


def net() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 10)
    ).cuda()


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_results_are_the_callers_own(made: list[replay.Replayed]) -> None:
    """All results of 100 calls of two functions, one with a graph break, stay what they were."""

    def broken(x: Tensor, w: Tensor) -> Tensor:
        y = layer(x, w)
        torch._dynamo.graph_break()
        return y.cos() @ w + 1

    first, second, w = graphed(layer), graphed(broken), randn(64, 64, device="cuda")
    kept = []
    for _ in range(50):
        x = randn(64, 64, device="cuda")
        y = first(x, w)
        kept += [(y, layer(x, w)), (second(y, w), broken(y, w)), (first(y, w), layer(y, w))]
    for got, want in kept:
        close(got, want)
    assert len(made) == 3 and min(replays(made)) >= 48


def test_results_of_kernels_of_libraries_and_views(made: list[replay.Replayed]) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w
        z = (y + 1).exp()
        return y, z.t(), x.t() + 1, z[1:], x, (z @ w).sum(0)

    run, w = graphed(fn), randn(33, 33, device="cuda")
    for k in range(6):
        base = randn(34, 70, device="cuda")
        x = base[1:, k : k + 33]  # of other strides, and not at a multiple of 16 bytes
        got, want = run(x, w), fn(x, w)
        close(got, want)
        assert [t.stride() for t in got] == [t.stride() for t in want] and got[4] is x


def same_steps(model: Any, other: Any, run: Callable[..., Any], xs: list[Tensor],
               at_once: int = 1) -> None:  # fmt: skip
    """Train a model by `run` and another one by eager: gradients and buffers are the same."""
    for k in range(0, len(xs), at_once):
        for m, f in ((model, run), (other, lambda x: other(x).square().mean())):
            m.zero_grad()
            losses = [f(x) for x in xs[k : k + at_once]]
            for loss in losses:
                loss.backward()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            close(a.grad, b.grad)
        for a, b in zip(model.buffers(), other.buffers(), strict=True):
            close(a, b)


@pytest.mark.parametrize("at_once", [1, 2])
def test_training(at_once: int, made: list[replay.Replayed]) -> None:
    """Also with two forwards before two backwards, whose gradients add up."""
    model = net()
    other = copy.deepcopy(model)
    run = graphed(lambda x: model(x).square().mean())
    xs = [randn(4, 3, 8, 8, device="cuda") for _ in range(16)]
    same_steps(model, other, run, xs, at_once)
    assert len(made) == 2 and min(replays(made)) >= 3


def test_depthwise_convolutions_in_channels_last(made: list[replay.Replayed]) -> None:
    """Their weights have a dimension of size 1, whose stride cuDNN chooses."""
    conv = functools.partial(nn.Conv2d, padding=1, groups=16, bias=False)
    model = nn.Sequential(conv(16, 16, 3), nn.SiLU(), conv(16, 16, 3))
    model = model.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    other = copy.deepcopy(model)
    run = graphed(lambda x: model(x).square().mean())
    x = randn(12, 2, 16, 8, 8, device="cuda", dtype=torch.bfloat16)
    same_steps(model, other, run, [y.to(memory_format=torch.channels_last) for y in x], 1)
    assert len(made) == 2 and min(replays(made)) >= 3


def test_gradients_that_stay(made: list[replay.Replayed]) -> None:
    """Gradients that the user keeps are not overwritten by the next step."""
    model = net()
    run = graphed(lambda x: model(x).square().mean())
    kept = []
    for _ in range(8):
        x = randn(4, 3, 8, 8, device="cuda")
        parameters = [*model.parameters()]
        got = torch.autograd.grad(run(x), parameters)
        want = torch.autograd.grad(model(x).square().mean(), parameters)
        kept.append((got, want))
    for got, want in kept:
        close(got, want)
    assert min(replays(made)) >= 5


def test_a_graph_of_autograd_that_is_used_twice(made: list[replay.Replayed]) -> None:
    model = net()
    run = graphed(lambda x: model(x).square().mean())
    for _ in range(6):
        x = randn(4, 3, 8, 8, device="cuda")
        model.zero_grad()
        loss = run(x)
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        loss.backward()
        for a, p in zip(once, model.parameters(), strict=True):
            close(2 * a, p.grad)


def test_random_numbers_are_those_without_graphs(made: list[replay.Replayed]) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.dropout(torch.dropout(x @ w, 0.5, True).exp() @ w, 0.3, True)

    x, w = randn(64, 64, device="cuda"), randn(64, 64, device="cuda")
    runs = [graphed(fn), graphed(fn, "off")]
    results = []
    for run in runs:
        torch._dynamo.reset()
        for _ in range(3):
            run(x, w)
        torch.manual_seed(3)
        results.append([run(x, w) for _ in range(5)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    assert not torch.equal(results[0][0], results[0][1])
    assert replays(made) == [6]


def test_sizes_have_graphs_of_their_own(made: list[replay.Replayed]) -> None:
    run, w = graphed(layer, dynamic=True), randn(64, 64, device="cuda")
    lengths = torch.randint(2, 40, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    for n in lengths:
        x = randn(n, 64, device="cuda")
        close(run(x, w), layer(x, w))
    assert all(len(r.made) <= r.options.cuda_graph_sizes for r in made) and sum(replays(made)) > 12


def test_parameters_that_move(made: list[replay.Replayed]) -> None:
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    run, x = graphed(lambda x: model(x).sin()), randn(8, 64, device="cuda")
    with torch.no_grad():
        for k in range(12):
            if k == 4:
                model[0].weight.data = randn(64, 64, device="cuda")
            if k == 8:
                new = {n: t * 0.5 for n, t in model.state_dict().items()}
                model.load_state_dict(new, assign=True)
            if k == 10:
                model[2].bias.add_(1)
            close(run(x), model(x).sin())
    assert sum(replays(made)) >= 4 and not any(r.moving for r in made)


def test_a_graph_of_the_user(made: list[replay.Replayed]) -> None:
    run = graphed(layer)
    x, w = randn(64, 64, device="cuda"), randn(64, 64, device="cuda")
    for _ in range(4):
        run(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x, w)
    for _ in range(3):
        x.copy_(randn(64, 64, device="cuda"))
        graph.replay()
        close(y, layer(x, w))


def test_streams_and_threads(made: list[replay.Replayed]) -> None:
    """Each stream has graphs of its own; threads get their own results."""
    run, w = graphed(layer), randn(64, 64, device="cuda")
    for _ in range(3):
        run(randn(64, 64, device="cuda"), w)
    torch.cuda.synchronize()
    wrong: list[float] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            g = torch.Generator("cuda").manual_seed(seed)
            for _ in range(200):
                x = randn(64, 64, device="cuda", generator=g)
                off = (run(x, w) - layer(x, w)).abs().max().item()
                wrong.extend([off] * (off > 2e-3))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_arguments_that_are_written(made: list[replay.Replayed]) -> None:
    def fn(cache: Tensor, x: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, x)
        return (cache @ cache.t()).softmax(-1) @ cache

    run = graphed(fn)
    mine, theirs = (torch.zeros(16, 64, device="cuda") for _ in "ab")
    for k in range(8):
        x, at = randn(1, 64, device="cuda"), torch.tensor([k], device="cuda")
        close(run(mine, x, at), fn(theirs, x, at))
        close(mine, theirs)


def test_graphs_around_steps_that_none_can_hold(made: list[replay.Replayed]) -> None:
    """Random numbers of torch's own, a custom op, and a number that a condition needs."""

    @torch.library.custom_op("lenz_graphs::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    scaled.register_fake(torch.empty_like)

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ w).exp()
        z = scaled((y @ w).tanh() + 1).sin() @ w
        n = torch.poisson((z @ w).abs().clamp(max=4) * 0 + 3)
        return (z + y.tanh()).softmax(-1) @ w, ((n > -1) * z).sin() @ w

    run, w = graphed(fn), randn(64, 64, device="cuda") * 0.1
    kept = []
    for _ in range(20):
        x = randn(64, 64, device="cuda")
        kept.append((run(x, w), fn(x, w)))
    for got, want in kept:
        close(got, want)
    (r,) = made
    assert r.graphed is not None and len(r.graphed.replays) >= 2 and replays(made)[0] >= 17


def test_attention_with_dropout_in_training(made: list[replay.Replayed]) -> None:
    """Dropout of attention draws torch's own numbers: the seed decides them as without graphs."""
    layers = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.2, batch_first=True).cuda()
    x, results = randn(4, 16, 64, device="cuda"), []
    for how in ("off", "on"):
        torch._dynamo.reset()
        model = copy.deepcopy(layers)
        run = graphed(lambda x, model=model: model(x).square().mean(), how)
        for _ in range(4):
            run(x).backward()
        torch.manual_seed(5)
        model.zero_grad()
        losses = [run(x) for _ in range(1)]
        losses[0].backward()
        results.append([losses[0].detach(), *[p.grad for p in model.parameters()]])
    for a, b in zip(*results, strict=True):
        close(a, b)
    assert sum(replays(made)) >= 2


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_draws_in_a_graph(kernel: str, made: list[replay.Replayed]) -> None:
    """Replays draw the numbers that launches draw, in the same order as the keys of kernels."""
    w = randn(3, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1)
        q, k, v = ((x @ p).view(2, 32, 4, 16).transpose(1, 2) for p in w)
        for _ in range(2):
            v = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return F.dropout(v, 0.5).float().square().sum()

    results, offsets, x = [], [], randn(2, 32, 64, device="cuda", dtype=torch.bfloat16)
    for how in ("off", "on"):
        torch._dynamo.reset()
        run, got = graphed(fn, how), list[Tensor]()
        torch.manual_seed(5)
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            for _ in range(8):
                w.grad = None
                loss = run(x)
                loss.backward()
                assert w.grad is not None
                got += [loss.detach().clone(), w.grad.clone()]
        results.append(got)
        offsets.append(torch.cuda.default_generators[0].get_offset())
    for a, b in zip(*results, strict=True):
        close(a, b)
    assert len({float(x) for x in results[0][::2]}) == 8, "each call draws other numbers"
    assert offsets[0] == offsets[1]
    forward, backward = made
    assert replays([forward])[0] >= 4 and replays([backward])[0] >= 1
    assert all(r.graphed and len(r.graphed.replays) == 1 and not r.graphed.outside for r in made)


def test_tensors_on_the_cpu(made: list[replay.Replayed]) -> None:
    """Indices on the CPU may differ in each call, and cut the plan."""

    def fn(x: Tensor, w: Tensor, at: Tensor) -> Tensor:
        return ((x @ w)[at].exp() @ w).sin()

    run, x = graphed(fn), randn(32, 32, device="cuda") * 0.1
    for _ in range(8):
        at = torch.randint(0, 32, (16,))
        close(run(x, x, at), fn(x, x, at))
    assert sum(replays(made)) >= 5 and "takes a tensor on the CPU" in made[0].told


@pytest.mark.parametrize("how", ["on", "auto"])
def test_attention_whose_forward_is_launched(how: str, made: list[replay.Replayed]) -> None:
    """Its seeds are then on the CPU, where no graph of the backward half may read them."""
    w = randn(3, 32, 32, device="cuda", requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        q, k, v = ((x @ p).view(1, -1, 4, 8).transpose(1, 2) for p in w)
        return F.scaled_dot_product_attention(q, k, v).exp().square().mean()

    run, xs = graphed(fn, how), [randn(64, 32, device="cuda") * 0.1 for _ in range(4)]
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        for n in (1, 4, 1, 4, 4, 1, 4, 4, 4, 1, 4, 4):  # of four, two are launched
            found = list[Tensor]()
            for f in (run, fn):
                w.grad = None
                for loss in [f(x) for x in xs[:n]]:
                    loss.backward()
                assert w.grad is not None
                found.append(w.grad.clone())
            close(*found)
    assert sum(replays(made)) >= 4


def test_two_threads_capture_at_once(made: list[replay.Replayed]) -> None:
    """Two functions on one stream, both of which draw: each gets its graph."""
    start = threading.Barrier(2, timeout=60)
    x = randn(2, 4, 32, 16, device="cuda", dtype=torch.bfloat16)
    fns = [
        lambda x: F.scaled_dot_product_attention(x.exp(), x, x, dropout_p=0.2).cos(),
        lambda x: F.scaled_dot_product_attention(x.sin(), x, x, dropout_p=0.3).sin() + 1,
    ]
    runs = [graphed(fn) for fn in fns]
    for run in runs:
        run(x)  # compiles, and does not capture

    def work(run: Callable[..., Any]) -> None:
        for _ in range(6):
            start.wait()
            run(x)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, runs))
    assert [r.why for r in made] == ["", ""] and min(replays(made)) >= 2


def test_graphs_of_a_stream_share_memory(made: list[replay.Replayed]) -> None:
    """Three graphs, two of them across a graph break, reserve what one does."""

    def part(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).sin() @ w).cos() @ w

    def broken(x: Tensor, w: Tensor) -> Tensor:
        y = part(x, w)
        torch._dynamo.graph_break()
        return part(y.sin(), w)

    def reserved() -> int:
        own = {memory.id for memory in cuda_graph.pools().values()}
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if s["segment_pool_id"] in own)

    w, found = randn(1024, 1024, device="cuda") / 32, list[int]()
    for fn in (part, broken):
        run = graphed(fn)
        for _ in range(4):
            close(run(w, w), fn(w, w))
        found.append(reserved())
    assert found[0] == found[1] >= w.nbytes and [n > 0 for n in replays(made)] == [True] * 3


def test_the_workspace_of_products_stays_mapped(made: list[replay.Replayed]) -> None:
    """Torch frees cuBLAS's workspace when it is asked to, but graphs hold its address.

    A split product of bf16 needs it. It lay in the pool of the first graph, and was unmapped if
    that graph was dropped and another compiler in the process cleared all workspaces.
    """

    def fn(x: Tensor) -> Tensor:
        return ((x @ x.t()).tanh() @ x).sin()

    def addresses() -> list[int]:
        own = cuda_graph.side_stream(0, torch.cuda.current_stream().cuda_stream)[1].id
        segments = torch.cuda.memory_snapshot()
        return [s["address"] for s in segments if s["segment_pool_id"] == own]

    x, run = randn(64, 1 << 16, device="cuda", dtype=torch.bfloat16), graphed(fn)
    for _ in range(4):
        run(x)
    assert (before := addresses()) and replays(made)[0] >= 2
    del run
    made.clear()
    torch._dynamo.reset()
    gc.collect()
    run = graphed(fn)
    want = [run(x) for _ in range(4)][-1]
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert addresses() == before
    taken = torch.full((1 << 28,), torch.nan, device="cuda")
    assert torch.equal(run(x), want) and taken.isnan().all() and replays(made)[0] >= 2


def test_captures_have_streams_of_their_own(made: list[replay.Replayed]) -> None:
    """torch has 32 streams for all who ask: none of them is one on which lenz captures."""
    run, w = graphed(layer), randn(64, 64, device="cuda")
    for _ in range(3):
        close(run(w, w), layer(w, w))
    theirs = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    own = cuda_graph.side_stream(0, torch.cuda.current_stream().cuda_stream)[0].cuda_stream
    assert len(theirs) == 32 and own not in theirs and replays(made) == [1]


def test_another_thread_draws_during_a_capture(
    made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture leaves torch's generator to others, unless the graph itself draws."""
    real, drawn = cuda_graph._Capture.all, list[Tensor]()

    def slow(self: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            drawn.append(pool.submit(lambda: torch.rand(8, device="cuda")).result())
        real(self)

    monkeypatch.setattr(cuda_graph._Capture, "all", slow)
    run, w = graphed(layer), randn(64, 64, device="cuda")
    torch.rand(8, device="cuda")
    torch.manual_seed(3)
    for _ in range(3):
        close(run(w, w), layer(w, w))
    torch.manual_seed(3)
    assert torch.equal(drawn[0], torch.rand(8, device="cuda"))
    assert len(drawn) == 1 and replays(made) == [1]


def test_auto_measures_while_another_thread_captures(
    made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its own stream: nobody may wait for a GPU on which a stream is captured."""
    real, w, inside = cuda_graph._Capture.all, randn(64, 64, device="cuda"), list[Tensor]()
    timed, captured = graphed(lambda x, w: layer(x, w).cos() @ w, "auto"), graphed(layer)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(timed, w, w).result()  # to warm up; cuBLAS makes the thread's handle

        def slow(self: Any) -> None:
            inside.append(pool.submit(timed, w, w).result())
            real(self)

        monkeypatch.setattr(cuda_graph._Capture, "all", slow)
        for _ in range(2):
            close(captured(w, w), layer(w, w))
    close(inside, [layer(w, w).cos() @ w])
    assert made[0].did[replay.TIMED] == 1 and made[1].did[replay.RECORD] == 1


def test_a_capture_that_another_thread_breaks_is_tried_again(
    made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, w = cuda_graph._Capture.all, randn(64, 64, device="cuda")

    def broken(self: Any) -> None:
        monkeypatch.undo()
        with ThreadPoolExecutor(1) as pool, suppress(RuntimeError):
            pool.submit(torch.cuda.synchronize).result()
        real(self)

    monkeypatch.setattr(cuda_graph._Capture, "all", broken)
    run = graphed(layer)
    for _ in range(5):
        close(run(w, w), layer(w, w))
    assert made[0].failures == 1 and replays(made) == [2]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_failed_capture_leaves_the_generator_as_it_was(
    breaks: bool, made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the driver gives up all captures of the thread."""
    w = randn(64, 64, device="cuda", dtype=torch.bfloat16)

    def fn(x: Tensor) -> Tensor:
        q = (x @ w).view(2, 32, 4, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).float().exp() + 1

    def fails(self: Any) -> None:
        if breaks:
            torch.cuda.synchronize()
        raise RuntimeError("no")

    run, x = graphed(fn), randn(2, 32, 64, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(cuda_graph._Capture, "all", fails)
    got = []
    for _ in range(2):
        torch.manual_seed(5)
        got.append([run(x) for _ in range(4)])
    for a, b in zip(*got, strict=True):
        close(a, b)
    assert "capturing it failed" in made[0].why and not torch.equal(got[0][0], got[0][1])


LINALG = {
    "svd": lambda x: torch.linalg.svdvals(x),
    "eigh": lambda x: torch.linalg.eigvalsh(x),
    "eig": lambda x: torch.linalg.eigvals(x).abs().sort().values,
    "matrix_exp": lambda x: torch.linalg.matrix_exp(0.01 * x),
    "pinv": lambda x: torch.linalg.pinv(x),
    "histc": lambda x: torch.histc(x, 16),
}


@pytest.mark.parametrize("name", LINALG)
def test_an_op_that_cannot_be_captured_is_left_outside(
    name: str, made: list[replay.Replayed]
) -> None:
    """The steps around it are captured, once it is known that it fails."""
    op, x = LINALG[name], randn(32, 32, device="cuda")

    def fn(x: Tensor) -> Tensor:
        y = (x @ x.t()).tanh()
        y = op(y + y.t() + 30 * torch.eye(32, device="cuda"))
        return y.cumsum(-1).softmax(-1).cumsum(-1)

    run, want = graphed(fn), fn(x)
    for _ in range(replay.FAILURES + 5):
        close(run(x), want)
    (r,) = made
    assert "failed when it was captured" in r.told and replays(made)[0] >= 2, r.told


def test_why_there_is_no_graph(made: list[replay.Replayed]) -> None:
    x, w = randn(64, 64, device="cuda"), randn(64, 64, device="cuda")
    cases: dict[str, Callable[..., Tensor]] = {
        "one kernel alone": lambda x, w: x.sin() + 1,
        "draws random numbers": lambda x, w: torch.poisson(x.abs()) + 1,
    }
    for why, fn in cases.items():
        made.clear()
        run = graphed(fn)
        for _ in range(3):
            run(x, w)
        assert any(why in r.why for r in made), (why, [r.why for r in made])


def test_auto_measures(made: list[replay.Replayed]) -> None:
    run = torch.compile(layer, backend="lenz", mode="reduce-overhead")
    x, w = randn(64, 64, device="cuda"), randn(64, 64, device="cuda")
    for _ in range(10):
        close(run(x, w), layer(x, w))
    (r,) = made
    assert "a replay takes" in r.choice and r.choice in r.told, "three calls each way"


def test_forwards_that_no_backward_follows_are_reported(made: list[replay.Replayed]) -> None:
    model = net()
    run = graphed(lambda x: model(x).square().mean())
    x = randn(4, 3, 8, 8, device="cuda")
    for _ in range(4):
        run(x).backward()
    losses = [run(x) for _ in range(5)]
    assert replay.ALIVE in made[0].told
    for loss in losses:
        close(loss, losses[0])
        loss.backward()


def test_memory_stays_flat(made: list[replay.Replayed]) -> None:
    w = randn(256, 256, device="cuda")
    levels = []
    for _ in range(4):
        run = graphed(layer)
        for _ in range(100):
            run(randn(256, 256, device="cuda"), w)
        del run
        made.clear()
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        levels.append(torch.cuda.memory_reserved())
    assert levels[3] <= levels[1], levels


class Chain(nn.Module):
    """Layers in a class of its own: Dynamo does not trace the containers of torch inside of DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 512) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_distributed_data_parallel_with_graphs(made: list[replay.Replayed]) -> None:
    """DDP's hooks and its reducer see the gradients of every step, replayed or not."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        own = Chain().cuda()
        other = copy.deepcopy(own)
        run = graphed(nn.parallel.DistributedDataParallel(own, bucket_cap_mb=1))
        for _ in range(8):
            x = randn(4, 512, device="cuda")
            for model, call in ((own, run), (other, other)):
                model.zero_grad()
                call(x).square().sum().backward()
            for p, q in zip(own.parameters(), other.parameters(), strict=True):
                close(p.grad, q.grad)
        assert len(made) > 2 and any(replays(made))  # several graphs: one per bucket
    finally:
        dist.destroy_process_group()


def test_fully_sharded_blocks_with_graphs(made: list[replay.Replayed]) -> None:
    """Each block is compiled; FSDP2 frees its gathered parameters after use, and gathers them anew.

    Their memory may lie elsewhere in each step: a graph that was captured for another place is not
    replayed.
    """
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(Chain(), Chain()).cuda()
        other = copy.deepcopy(model)
        options = {"cuda_graphs": "on", "cache": False}
        for layer in model:
            layer.compile(backend="lenz", options=options)
            fully_shard(layer)
        fully_shard(model)
        steps = [(m, torch.optim.SGD(m.parameters(), 0.01)) for m in (model, other)]
        for _ in range(8):
            x, kept = randn(4, 512, device="cuda"), []
            for m, optimizer in steps:
                loss = m(x).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                kept.append(loss)
            close(*kept)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            close(p.full_tensor(), q)  # type: ignore[attr-defined]  # a DTensor
        assert made
    finally:
        dist.destroy_process_group()
