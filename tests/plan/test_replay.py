"""Plans around CUDA graphs, on a CPU: the steps of a graph run where it would be captured.

What a graph reads, writes, keeps and copies is as on a GPU, so that a name that is missing or
memory that is not the caller's is found here. Which steps are outside is chosen by the tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

import lenz
from lenz import replay, trial
from lenz.errors import UserError
from lenz.ir.plan import CallStep, Step
from lenz.plan import regions
from lenz.runtime.captured import CaptureError, Record
from tests.simulated_graphs import cut, simulate


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[replay.Replayed]:
    """The plans, whose graphs are simulated in the first call."""
    return simulate(monkeypatch)


def compiled(fn: Callable[..., Any], dynamic: bool | None = None, **how: Any) -> Callable[..., Any]:
    options = {"cuda_graphs": "on", "cache": False, **how}
    return torch.compile(fn, backend="lenz", options=options, dynamic=dynamic)


def layers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = torch.softmax(x @ w, -1)
    y = torch.cat([h, h.t() @ h]).cumsum(0)
    return y.t(), (y @ w)[1:], h.sort(-1).values, x, (h @ w).exp() @ w


def embedded(x: Tensor, w: Tensor) -> Tensor:
    ids = x.abs().argmax(-1)
    return F.dropout(F.layer_norm(w[ids] @ w, (8,)), 0.5) @ w.cumsum(1)


def written(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(2)
    y = x @ w
    x.add_(y.softmax(-1) @ w)
    return y.relu()


CASES = {"layers": layers, "embedded": embedded, "written": written}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("every", [0, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_results(
    name: str, every: int, calls: bool, made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, every, calls)
    fn, x, w = CASES[name], randn(8, 8), randn(8, 8)
    mine, theirs = x.clone(), x.clone()
    torch.manual_seed(1)
    got = compiled(fn)(mine, w)
    torch.manual_seed(1)
    want = torch.compile(fn, backend="lenz", options={"cache": False})(theirs, w)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine, theirs)
    (r,) = made
    if name == "layers" and not calls:
        assert r.why == "native code does not run it", "it has been captured"


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_training(
    fails: bool, every: int, made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both halves; also where capturing fails, from the second graph on."""
    cut(monkeypatch, every, calls=False)
    if fails:
        real = getattr(replay, "loader_of")("cpu").capture  # noqa: B009 - the one of the fixture
        tries: list[int] = []

        def capture(*args: Any) -> Any:
            tries.append(1)
            if len(tries) > 1 or not every:
                raise RuntimeError("operation not permitted when stream is capturing")
            return real(*args)

        monkeypatch.setattr(replay, "loader_of", lambda device: SimpleNamespace(capture=capture))
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(144, 5)
    )
    x = randn(2, 3, 8, 8)
    parameters = [*model.parameters()]
    run = compiled(lambda x: model(x).square().sum())
    for _ in range(replay.FAILURES):
        got = torch.autograd.grad(run(x), parameters)
        want = torch.autograd.grad(model(x).square().sum(), parameters)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(made) == 2
    if fails:
        assert "not permitted" in made[1].why and f"{replay.FAILURES} without" in made[1].told


def test_a_result_in_reused_memory_where_capturing_fails(
    made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of the graph leave only the last of three names of its memory."""
    cut(monkeypatch, 0, calls=False)

    def fails(*args: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "loader_of", lambda device: SimpleNamespace(capture=fails))

    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = F.layer_norm(x @ w, (8,))
        return F.layer_norm(h + h @ w, (8,)).view(2, 4, 8)

    run, x, w = compiled(fn), randn(8, 8), randn(8, 8)
    torch.testing.assert_close(run(x, w), fn(x, w))
    (r,) = made
    assert "1 without a graph because capturing it failed" in r.told


def test_an_argument_in_the_gaps_of_another(
    made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of both alternate in memory: no copy back into one may reach the other's."""
    cut(monkeypatch, 0, calls=False)

    def fn(x: Tensor, y: Tensor) -> None:
        y.add_(1)
        x.add_(x @ x)

    run, mine, theirs = compiled(fn), randn(4, 8), torch.empty(4, 8)
    for _ in range(3):
        theirs.copy_(mine)
        run(mine[:, :4], mine[:, 4:])
        fn(theirs[:, :4], theirs[:, 4:])
        torch.testing.assert_close(mine, theirs)
    assert "gaps" in made[0].why


def test_saved_tensors_that_have_no_address(
    made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse tensors from hooks: no graph takes them, and the plan makes them dense."""
    cut(monkeypatch, 0, calls=False)
    w = randn(8, 8, requires_grad=True)
    fn = lambda x, w: (x @ w).exp() @ w
    run, x = compiled(fn), randn(8, 8)
    (want,) = torch.autograd.grad(fn(x, w).sum(), w)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, Tensor.to_sparse):
            y = run(x, w)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), w), (want,))


def test_an_op_that_fails_in_a_capture_is_left_outside(
    made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it failed several times; the rest of the plan is captured."""

    def refusal(s: Step, facts: regions.CaptureFacts) -> str:
        return "it failed" if isinstance(s, CallStep) and s.op in facts.refused else ""

    monkeypatch.setattr(regions, "_refusal", refusal)
    real = getattr(replay, "loader_of")("cpu").capture  # noqa: B009 - the one of the fixture

    def capture(w: Any, *where: Any) -> Any:
        for s in w.steps:
            if isinstance(s, CallStep) and "inv" in s.op:
                raise CaptureError(s.op, "it waits for the GPU")
        return real(w, *where)

    monkeypatch.setattr(replay, "loader_of", lambda device: SimpleNamespace(capture=capture))
    fn = lambda x: torch.linalg.inv(x.cumsum(0) @ x).softmax(-1) @ x.sin().cumsum(1)
    run, x = compiled(fn), torch.eye(8) + 0.1 * randn(8, 8)
    for k in range(replay.FAILURES + 1):
        torch.testing.assert_close(run(x), fn(x), rtol=1e-4, atol=1e-4)
        (r,) = made
        if k < replay.FAILURES - 1:
            assert r.graphed is not None and not r.graphed.outside
        elif k < replay.FAILURES:
            assert r.graphed is not None and r.graphed.outside[0].startswith("it failed")
    assert r.why == "native code does not run it", "its other steps have been captured"


def test_arguments_that_the_plan_does_not_take(
    made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No graph is made for other strides, dtypes, classes or sizes, or for bits of the sign."""
    cut(monkeypatch, 0, calls=False)
    x, w = randn(8, 8), randn(8, 8)
    run = compiled(lambda x, w: torch.softmax(x @ w, -1) @ w)
    run(x, w)
    (r,) = made

    class Other(Tensor):
        pass

    assert replay.takes(r.given.plan, [x, w]) and replay.takes(r.given.plan, [nn.Parameter(x), w])
    for other in (
        x.t(),
        x.double(),
        x.as_subclass(Other),
        torch._neg_view(x),
        randn(8, 9),
        3,
        None,
    ):
        assert not replay.takes(r.given.plan, [other, w])


class Graph:
    """A graph that runs the plan for its sizes, unless it is held or a call is under way."""

    def __init__(self, of: replay.Replayed, key: replay.Key) -> None:
        self.of, self.key, self.read = of, key, (of.sizes, of.starts)
        self.replays, self.is_held, self.is_busy = 0, False, False

    def made(self) -> replay.GraphCall:
        return replay.GraphCall(self.call, self.tried, (self,))  # type: ignore[arg-type]

    def call(self, args: list[Any]) -> Any:
        results = self.tried(args)
        return self.of.decide(args) if results is None else results

    def tried(self, args: list[Any]) -> Any:
        assert self.of.graphed is not None
        key = tuple(read(args) for read in self.read)
        if self.is_held or self.is_busy or key != self.key:
            return None
        self.replays += 1
        return self.of.plain(args)


@pytest.fixture
def simulated(made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs of all plans, which run; made by the second calls of their sizes."""
    cut(monkeypatch, 0, calls=False)
    found: list[Graph] = []

    def linked(self: Any, graphed: Any, key: replay.Key, *args: Any) -> replay.GraphCall:
        found.append(Graph(self, key))
        return found[-1].made()

    monkeypatch.setattr(getattr(replay, "Replayed"), "linked", linked)  # noqa: B009 - of the fixture
    monkeypatch.setattr(replay, "WARM", 1)
    return found


def soft(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1) @ w


def told(report: Any) -> str:
    (graph,) = report.graphs
    return str(graph.cuda_graph)


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_the_report_says_what_calls_do(calls: int, simulated: list[Graph]) -> None:
    options = {"cuda_graphs": "on", "cache": False}
    x, w = randn(8, 8), randn(8, 8)
    report = lenz.explain(soft, options=options, calls=calls)(x, w)
    did = ["1 warm-up", "1 record", f"{calls - 2} replay"][: min(calls, 3)]
    assert told(report) == f"all of it; calls: {', '.join(did)}"
    torch.testing.assert_close(report.result, soft(x, w))
    assert len(report.launches) == len(lenz.explain(soft)(x, w).launches), "of the last call alone"


def test_the_report_says_that_native_code_is_off(made: list[replay.Replayed]) -> None:
    options = {"cuda_graphs": "on", "cache": False, "native": False}
    report = lenz.explain(soft, options=options, calls=3)(randn(8, 8), randn(8, 8))
    assert (
        told(report)
        == "none, since only native code replays graphs, and the option `native` is off"
    )


def test_the_first_call_of_a_thread_captures_nothing(
    made: list[replay.Replayed], simulated: list[Graph]
) -> None:
    """Libraries make a thread's handles in it."""
    run, x, w = compiled(soft), randn(8, 8), randn(8, 8)
    run(x, w)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):  # torch checks custom ops in the first one, which does not count
            pool.submit(run, x, w).result()
        assert made[0].told == "all of it; calls: 2 warm-up"
        pool.submit(run, x, w).result()
    run(x, w)
    assert made[0].told == "all of it; calls: 2 warm-up, 1 record, 1 replay"


def test_a_forward_before_the_backward_of_the_last_one_is_reported(
    made: list[replay.Replayed], simulated: list[Graph]
) -> None:
    run, x, w = compiled(soft), randn(8, 8), randn(8, 8)
    for _ in range(3):
        run(x, w)
    (r,) = made
    simulated[0].is_held = True
    run(x, w)
    assert len(simulated) == 2 and "2 record" in r.told, "a second graph takes turns"
    simulated[1].is_held = True
    torch.testing.assert_close(run(x, w), soft(x, w))
    assert "1 without a graph because the last forward is alive" in r.told
    simulated[0].is_held = simulated[1].is_held = False
    simulated[0].is_busy = simulated[1].is_busy = True
    run(x, w)
    assert "1 without a graph because another call is under way" in r.told


def clocked(
    made: list[replay.Replayed], monkeypatch: pytest.MonkeyPatch, plain: list[float],
    replayed: list[float], host: float = 0.0,
) -> None:  # fmt: skip
    """Calls take these milliseconds, in turn; launches take `host` of them on the host."""

    def timed(run: Any, args: list[Any], gpu: int) -> tuple[trial.Seconds, Any]:
        is_plain = any(run is r.plain for r in made)
        took = (plain if is_plain else replayed).pop(0)
        return (took / 1e3, host / 1e3 if is_plain else 0.0), run(args)

    monkeypatch.setattr(trial, "timed_call", timed)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize(
    ("plain", "replayed", "host", "is_chosen"),
    [
        ([9.0, 2.0, 2.2], [1.0, 7.0, 1.1], 0, True),
        ([0.1, 2.0, 2.0], [1.0, 1.0, 1.0], 0, True),  # one call each way would have decided wrongly
        ([1.0, 1.0, 9.0], [0.1, 2.0, 2.0], 0, False),
        ([1.0, 1.0, 1.0], [1.01, 1.01, 1.01], 0, True),
        ([1.0, 1.0, 1.0], [1.1, 1.1, 1.1], 0.9, True),  # the host has time for other work
        ([1.0, 1.0, 1.0], [1.1, 1.1, 1.1], 0.3, False),
    ],
)
def test_auto_takes_the_median_of_three_calls_each_way(
    plain: list[float], replayed: list[float], host: float, is_chosen: bool,
    made: list[replay.Replayed], simulated: list[Graph], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    clocked(made, monkeypatch, plain, replayed, host)
    ways = [sorted(plain)[1], sorted(replayed)[1]]
    run, x, w = compiled(soft, cuda_graphs="auto"), randn(8, 8), randn(8, 8)
    for _ in range(12):
        torch.testing.assert_close(run(x, w), soft(x, w))
    (r,) = made
    assert not plain and not replayed, "three of each"
    times = (
        f"a replay takes {ways[1]:.3f} ms (0.000 on the host), launches {ways[0]:.3f} ({host:.3f})"
    )
    if is_chosen:
        did = "calls: 1 warm-up, 3 by launches to time them, 1 record, 7 replay"
        assert r.told == f"all of it; auto: {times}; {did}"
    else:
        did = "calls: 1 warm-up, 3 by launches to time them, 1 record, 3 replay"
        assert r.told == f"none, since {times}; {did}"
        assert r.now is r.plain, "calls pay nothing for what is not used"


def test_auto_times_no_call_that_cannot_change_its_mind(
    made: list[replay.Replayed], simulated: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, replayed = [2.0, 2.1, 0.5], [1.0, 2.0, 9.0]
    clocked(made, monkeypatch, plain, replayed)
    run, x, w = compiled(soft, cuda_graphs="auto"), randn(8, 8), randn(8, 8)
    for _ in range(12):
        torch.testing.assert_close(run(x, w), soft(x, w))
    assert plain == [0.5] and replayed == [9.0] and "auto: a replay takes 1.500 ms" in made[0].told


def test_auto_decides_for_each_set_of_sizes(
    made: list[replay.Replayed], simulated: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large sizes keep the GPU busy, and a graph of small ones pays all the same."""
    clocked(made, monkeypatch, [1.0] * 6, [2.0] * 3 + [0.5] * 3)
    run = compiled(soft, cuda_graphs="auto", dynamic=True)
    w = randn(8, 8)
    for n in [30] * 8 + [20] * 8 + [30] * 2:
        x = randn(n, 8)
        torch.testing.assert_close(run(x, w), soft(x, w))
    (r,) = made
    assert [k[0][1:] for k in r.made] == [(20, 8)] and len(r.slow) == 1
    assert "replay takes 0.500 ms" in r.told


@pytest.mark.parametrize("most", [1, 3])
def test_so_many_sets_of_sizes_have_graphs(
    most: int, made: list[replay.Replayed], simulated: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = compiled(soft, cuda_graph_sizes=most, dynamic=True)
    w = randn(8, 8)
    for n in range(2, 7):
        for _ in range(3):
            x = randn(n, 8)
            torch.testing.assert_close(run(x, w), soft(x, w))
    (r,) = made
    assert len(r.made) == most == len(simulated)
    assert f"{3 * (5 - most)} without a graph because other sizes have them" in r.told
    monkeypatch.setattr(r, "starts", lambda args: pytest.fail("an address is read for nothing"))
    run(randn(7, 8), w)
    with pytest.raises(UserError, match="cuda_graph_sizes: 0 is below 1"):
        lenz.explain(soft, options={"cuda_graph_sizes": 0})


@pytest.mark.parametrize("is_slow", [False, True])
def test_auto_ends_with_many_sizes(
    is_slow: bool, made: list[replay.Replayed], simulated: list[Graph],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A graph whose trial goes on is in use: it does not make room for another one.

    200 lengths in turn captured 7 graphs in each round for ever, and took 1.8 times as long.
    """
    monkeypatch.setattr(replay, "REST", 50)
    clocked(made, monkeypatch, [1.0] * 500, [2.0 if is_slow else 0.5] * 500)
    run, w = compiled(soft, cuda_graphs="auto", cuda_graph_sizes=3, dynamic=True), randn(8, 8)
    counts = list[int]()
    for _ in range(14):
        for n in range(2, 42):
            run(randn(n, 8), w)
        counts.append(len(simulated))
    (r,) = made
    assert counts[-1] == counts[8] <= 12, counts
    assert (r.now is r.plain) == is_slow and len(r.made) == (0 if is_slow else 3)
    assert not r.trials.keys() & r.made.keys()


def test_sizes_at_random_do_not_push_each_other_out(
    made: list[replay.Replayed], simulated: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph with a few replays has not paid for its capture when it makes room."""
    monkeypatch.setattr(replay, "REST", 8)
    run, w, chosen = compiled(soft, cuda_graph_sizes=2, dynamic=True), randn(8, 8), Random(0)
    for _ in range(600):
        run(randn(chosen.randrange(2, 8), 8), w)
    assert len(simulated) < 10, "14 where one replay was enough"


def test_memory_that_somebody_holds() -> None:
    """The counts of owners are those that native code compares."""
    count = ctypes.c_uint32(2)
    found = SimpleNamespace(exec=0, owners=[(ctypes.addressof(count), 1)], nodes=[], uses={})
    record = Record(found, 0, [], [])  # type: ignore[arg-type]
    assert record.is_held
    count.value = 1
    assert not record.is_held


def test_many_sizes_that_take_turns_keep_their_graphs(
    made: list[replay.Replayed], simulated: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that gives way before its size comes again is made for nothing, and soon none is."""
    monkeypatch.setattr(replay, "REST", 8)
    run, w = compiled(soft, cuda_graph_sizes=2, dynamic=True), randn(8, 8)
    for _ in range(6):
        for n in range(2, 62):
            run(randn(n, 8), w)
    assert len(simulated) < 10, "without doubling, 30 graphs"
    assert sum(g.replays for g in simulated) >= 4
