"""What `lenz.explain` tells of whole programs; rows S0-* and S2-* of the feature list."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lenz
from benchmarks.memory import allocated
from lenz.debug.report import ExternReport, KernelReport
from lenz.errors import UserError
from lenz.options import Options
from lenz.page.explainer import Explainer
from lenz.page.report import Report

Tensors = list[torch.Tensor]


def adam(
    w16: torch.Tensor, g16: torch.Tensor, m: torch.Tensor, v: torch.Tensor, w32: torch.Tensor
) -> None:
    g32 = g16.to(torch.float32)
    m_new = 0.9 * m + (1 - 0.9) * g32
    v_new = 0.99 * v + (1 - 0.99) * (g32 * g32)
    w_new = w32 - (0.001 * m_new) / (torch.sqrt(v_new) + 1e-5)
    w16.copy_(w_new)
    m.copy_(m_new)
    v.copy_(v_new)
    w32.copy_(w_new)


def adam_args(n: int) -> Tensors:
    g = torch.Generator().manual_seed(0)
    w32 = torch.randn(n, generator=g)
    grad = torch.randn(n, generator=g).bfloat16()
    m, v = torch.rand(n, generator=g), torch.rand(n, generator=g)
    return [w32.bfloat16(), grad, m, v, w32.clone()]


def explained(fn: Callable[..., Any], args: Tensors, **how: Any) -> Report:
    """The report of `fn` on copies of `args`, after checking the values against eager."""
    mine, theirs = [a.clone() for a in args], [a.clone() for a in args]
    report = lenz.explain(fn, **how)(*mine)
    torch.testing.assert_close(report.result, fn(*theirs))
    torch.testing.assert_close(mine, theirs)
    return report


def only_kernel(report: Report) -> KernelReport:
    (launch,) = report.launches
    assert isinstance(launch, KernelReport)
    return launch


def test_adam_is_one_kernel_with_four_stores_and_no_allocation() -> None:
    args = adam_args(100_003)
    pointers = [a.data_ptr() for a in args]
    report = lenz.explain(adam)(*args)
    k = only_kernel(report)
    assert report.allocs == ()
    assert report.result is None
    assert set(k.mutated_args) == {"w16", "m", "v", "w32"}
    assert set(k.stores) == set(k.mutated_args) and len(k.stores) == 4
    assert [a.data_ptr() for a in args] == pointers


def test_adam_computes_each_value_once() -> None:
    n = 4096
    k = only_kernel(explained(adam, adam_args(n)))
    assert k.ops == {"mul": 6, "add": 3, "sub": 1, "div": 1, "sqrt": 1, "cast": 2}
    assert k.bytes_read == n * (2 + 4 + 4 + 4)
    assert k.bytes_written == n * (2 + 4 + 4 + 4)


def test_adam_does_not_read_what_it_overwrites() -> None:
    assert set(only_kernel(explained(adam, adam_args(1000))).loads) == {"g16", "m", "v", "w32"}


def test_adam_rounds_to_bf16_as_eager_does() -> None:
    mine, theirs = adam_args(5000), adam_args(5000)
    lenz.explain(adam)(*mine)
    adam(*theirs)
    assert torch.equal(mine[0], theirs[0])


def test_adam_that_returns_its_state_allocates_the_results_only() -> None:
    def step(
        w16: torch.Tensor, g16: torch.Tensor, m: torch.Tensor, v: torch.Tensor, w32: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        g32 = g16.float()
        m_new = 0.9 * m + 0.1 * g32
        v_new = 0.99 * v + 0.01 * (g32 * g32)
        w_new = w32 - (0.001 * m_new) / (torch.sqrt(v_new) + 1e-5)
        w16.copy_(w_new)
        return m_new, v_new, w_new

    report = explained(step, adam_args(4099))
    k = only_kernel(report)
    assert len(k.stores) == 4 and k.mutated_args == ("w16",)
    assert [a.nbytes for a in report.allocs] == [4 * 4099] * 3
    assert all(a.freed_at is None and a.reused_from is None for a in report.allocs)


def test_one_compile_serves_every_size() -> None:
    counter = CompileCounterWithBackend("lenz")
    compiled = torch.compile(adam, backend=counter, dynamic=True, fullgraph=True)
    for n in (1000, 1001, 4096, 77):
        mine, theirs = adam_args(n), adam_args(n)
        compiled(*mine)
        adam(*theirs)
        torch.testing.assert_close(mine, theirs)
    assert counter.frame_count == 1


def test_sizes_become_dynamic_by_themselves() -> None:
    counter = CompileCounterWithBackend("lenz")
    compiled = torch.compile(adam, backend=counter, fullgraph=True)
    for n in (1000, 2000, 3000):
        compiled(*adam_args(n))
    assert counter.frame_count <= 2


def test_dynamic_bytes_are_those_of_the_example() -> None:
    k = only_kernel(explained(adam, adam_args(1001), dynamic=True))
    assert k.bytes_read == 1001 * 14 and k.bytes_written == 1001 * 14


def test_each_launch_stands_below_its_origins() -> None:
    report = explained(adam, adam_args(100))
    lines = report.graphs[0].source.splitlines()
    (at,) = [k for k, line in enumerate(lines) if f"{only_kernel(report).name}(" in line]
    assert lines[at - 1].lstrip().startswith("# ")
    first = inspect.getsourcelines(adam)[1]
    for k, line in enumerate(inspect.getsource(adam).splitlines()):
        if " = " in line:  # each line of arithmetic has its part in the kernel
            assert f"{__file__}:{first + k}" in lines[at - 1], line


def test_launches_of_one_kernel_have_their_own_lines() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(x)
        a = a @ a
        a = torch.tanh(a)
        a = a @ a
        return torch.tanh(a)

    report = explained(f, [torch.randn(64, 64)])
    first = inspect.getsourcelines(f)[1]
    lines = [f"{__file__}:{first + k}" for k in range(1, 6)]
    names = ["tanh", "mm", "tanh_1", "mm_1", "tanh_2"]
    assert [s.origins for s in report.launches] == [*zip(names, lines, strict=True)]
    kernels = [s.name for s in report.launches if isinstance(s, KernelReport)]
    assert len(set(kernels)) == 1, "the launches must be of one kernel for this test"
    source = [line.strip() for line in report.graphs[0].source.splitlines()]
    for name, line in zip(names, lines, strict=True):
        assert f"# {line}, {name}" in source
    for line in lines:
        assert f" at {line}" in str(report)


def test_a_module_of_torch_has_the_line_that_called_it() -> None:
    x, m = torch.randn(4, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    report, line = lenz.explain(m)(x), here()
    assert [s.origins[1] for s in report.launches] == [f"{__file__}:{line}"] * 2
    assert not [o for s in report.launches for o in s.origins if "torch" in o or "lenz/api" in o]


def here() -> int:
    """The line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_the_time_before_a_backward_is_not_its_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lenz.api.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * x).tanh().sum()

    seen = Explainer()
    x = torch.randn(9, requires_grad=True)
    loss = torch.compile(f, backend=seen.backend(Options()))(x)
    now[0] += 1e6  # seconds of the user's
    loss.backward()
    (backward,) = [g for g in seen.report().graphs if g.kind == "backward"]
    assert backward.timings["trace"] == 0, "what the user did before it was counted"


def test_a_line_that_is_gone_is_gone_from_the_comment() -> None:
    def two(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        return y + 1

    def one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert "sin" in only_kernel(explained(two, [torch.randn(9)])).origins
    k = only_kernel(explained(one, [torch.randn(9)]))
    line = inspect.getsourcelines(one)[1] + 1
    assert k.origins == ("add", f"{__file__}:{line}")


def test_kernels_know_their_nodes_and_lines() -> None:
    k = only_kernel(explained(lambda x: torch.relu(x + 1), [torch.randn(50)]))
    assert "relu" in k.origins
    assert any(o.startswith(__file__ + ":") for o in k.origins)


@pytest.mark.parametrize("dynamic", [False, True])
def test_partial_reads_count_what_is_touched(dynamic: bool) -> None:
    x = torch.randn(64, 32)
    k = only_kernel(explained(lambda x: x[::2, :8] + 1, [x], dynamic=dynamic))
    assert (k.bytes_read, k.bytes_written) == (32 * 8 * 4, 32 * 8 * 4)
    k = only_kernel(explained(lambda x: x[1:] + x[:-1], [x], dynamic=dynamic))
    assert k.bytes_read == 64 * 32 * 4
    k = only_kernel(explained(lambda x, b: x + b, [x, torch.randn(32)], dynamic=dynamic))
    assert k.bytes_read == (64 * 32 + 32) * 4


def test_embedding_reads_the_rows_it_names() -> None:
    rows = torch.tensor([3, 1, 2])
    k = only_kernel(explained(lambda w, i: w[i] * 2, [torch.randn(1000, 16), rows]))
    assert k.bytes_read == 3 * 8 + 3 * 16 * 4
    assert k.loads and set(k.loads) == {"w", "i"}


def test_the_ir_tells_types_extents_and_origins() -> None:
    report = explained(lambda x: (x.exp() / 3).sum(-1), [torch.randn(7, 9)])
    text = report.graphs[0].ir
    assert "on cpu" in text and "f32[7" in text and "9)" in text
    assert f"{__file__}:" in text
    assert report.graphs[0].timings.keys() >= {"trace", "lower", "schedule", "codegen", "plan"}
    assert re.match(r"graph(\d+)\.inference \[\1/0\]: 1 kernel,", str(report.graphs[0]))
    # What a notebook shows of the last line of a cell.
    assert repr(report) == str(report) and len(repr(report).splitlines()) == 4


def constants() -> tuple[torch.Tensor, ...]:
    return (
        torch.tensor(False),
        torch.tensor(0),
        torch.tensor(1),
        torch.tensor(5),
        torch.tensor(True),
        torch.tensor(False),
        torch.arange(10),
    )


def test_constants_without_arguments() -> None:
    report = lenz.explain(constants)()
    torch.testing.assert_close(report.result, constants())
    names = [k.name for k in report.graphs[0].kernels]
    assert len(names) <= 7
    compiled = torch.compile(constants, backend="lenz", fullgraph=True)
    first = compiled()
    first[0].fill_(True)
    assert not bool(first[5]) and not bool(compiled()[0])


def test_equal_kernels_are_compiled_once() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.relu(x @ w)
        return x

    report = explained(f, [torch.randn(8, 8), torch.randn(8, 8)])
    kernels = [x for x in report.launches if isinstance(x, KernelReport)]
    assert len(kernels) == 3 and len({k.name for k in kernels}) == 1


def test_dead_buffers_are_reused() -> None:
    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x @ w
        return x

    report = explained(chain, [torch.randn(16, 16), torch.randn(16, 16) / 4])
    assert all(isinstance(x, ExternReport) for x in report.launches) and len(report.launches) == 10
    assert not report.graphs[0].fallbacks
    fresh = [a for a in report.allocs if a.reused_from is None]
    assert len(fresh) <= 2
    assert sum(a.reused_from is not None for a in report.allocs) >= 8
    without = explained(
        chain, [torch.randn(16, 16), torch.randn(16, 16) / 4], options={"reuse_buffers": False}
    )
    assert all(a.reused_from is None for a in without.allocs)


def test_the_timeline_has_the_bytes_at_each_step() -> None:
    def chain(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = torch.sin(x @ w)
        return x.sum(0)

    size = 4 * 64 * 64
    for dynamic in (False, True):
        args = [torch.randn(64, 64), *(torch.randn(64, 64) / 8 for _ in range(10))]
        report = explained(chain, args, dynamic=dynamic)
        (graph,) = report.graphs
        assert graph.fallbacks == ()
        assert [m.what for m in graph.timeline if "mm" in m.what], graph.timeline
        assert len(graph.timeline) == len(report.launches) >= 20
        # One product, and what is read to make it or made of it.
        assert all(size <= m.nbytes <= 2 * size for m in graph.timeline[1:-1]), graph.timeline
        assert graph.timeline[0].nbytes == size and graph.peak == 2 * size
        assert f"memory: at most {2 * size / 1e6:.3f} MB beside the arguments" in repr(graph)


def test_the_peak_is_what_the_allocator_counts() -> None:
    """Libraries allocate nothing for themselves here: these products need no other layout."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 1),
        torch.nn.BatchNorm2d(16),
        torch.nn.SiLU(),
        torch.nn.Conv2d(16, 16, 1),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 32 * 32, 10),
    )
    x = torch.randn(4, 8, 32, 32)
    graph = lenz.explain(net)(x).graphs[0]
    run = torch.compile(net, backend="lenz")
    run(x).sum().backward()
    assert graph.kind == "forward" and graph.peak == allocated(lambda: run(x))


def test_views_and_results_of_calls_hold_memory_in_the_timeline() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.linalg.eigh(x)  # an eager call with two results
        return values.view(8, 8) + 1, places.sum()

    a = torch.randn(64, 64)
    (graph,) = explained(f, [a + a.T]).graphs
    assert max(m.nbytes for m in graph.timeline) >= 4 * (64 * 64 + 64), "the results of the call"
    assert graph.timeline[-1].nbytes < graph.peak + 4 * 64, "nothing is counted twice"
    (graph,) = explained(lambda x: x.view(-1)[3:], [torch.randn(4, 4)]).graphs
    assert graph.timeline == () and graph.peak == 0 and "memory" not in repr(graph)


def test_a_fallback_has_its_reason() -> None:
    report = explained(lambda x: torch.igamma(x, x) + 1, [torch.rand(3) + 2])
    (fallback,) = report.graphs[0].fallbacks
    assert fallback.reason and fallback.is_fallback
    kinds = [type(x).__name__ for x in report.launches]
    assert kinds == ["ExternReport", "KernelReport"]


def test_rejected_fusions_have_their_reason() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu((x + 1) @ w) * 2

    report = explained(f, [torch.randn(8, 8), torch.randn(8, 8)], options={"fuse": False})
    assert all(r.why for r in report.graphs[0].rejected)


def test_graph_breaks_give_several_graphs_and_one_list_of_launches() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    report = explained(f, [torch.randn(5)])
    first, second = [int(g.name.removeprefix("graph").split(".")[0]) for g in report.graphs]
    assert second == first + 1
    assert len(report.launches) == 2
    assert "graph_break" in report.graphs[0].ended_by


def test_training_names_parameters_and_counts_the_backward_pass() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(self.norm(x)).sum()

    net = Net()

    def step(x: torch.Tensor) -> None:
        net(x).backward()

    report = lenz.explain(step)(torch.randn(4, 16))
    assert {g.kind for g in report.graphs} == {"forward", "backward"}
    loads = {name for k in report.graphs[0].kernels for name in k.loads}
    assert {"x", "net.norm.weight", "net.norm.bias"} <= loads
    assert len(report.launches) == sum(len(g.kernels) + len(g.externs) for g in report.graphs)


def test_unknown_options_are_refused_before_compiling() -> None:
    with pytest.raises(ValueError, match="did you mean fuse"):
        lenz.explain(adam, options={"fuze": True})


def test_wrong_arguments_are_refused_before_compiling() -> None:
    for watch in (lenz.explain, lenz.profile):
        with pytest.raises(UserError, match="expected a function or a module, got 3"):
            watch(3)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="calls: expected a whole number from 1, got 0"):
            watch(adam, calls=0)
    with pytest.raises(UserError, match="profile: expected a whole number from 0, got -1"):
        lenz.explain(adam, profile=-1)


def test_reports_do_not_use_up_what_dynamo_allows() -> None:
    def f(x: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
        return x + by

    class Shift(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - 1

    for subject in (f, Shift()):
        assert [len(lenz.explain(subject)(torch.ones(3)).graphs) for _ in range(10)] == [1] * 10
    counter = CompileCounterWithBackend("lenz")
    compiled = torch.compile(f, backend=counter)
    compiled(torch.ones(3))
    assert counter.frame_count == 1
    assert len(lenz.explain(compiled)(torch.ones(3), by=2.0).graphs) == 1


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_learning_rate_that_changes_is_compiled_twice_at_most(kind: Callable[..., Any]) -> None:
    def step(p: torch.Tensor, g: torch.Tensor, lr: Any) -> None:
        p.sub_(lr * g)

    counter = CompileCounterWithBackend("lenz")
    compiled = torch.compile(step, backend=counter)
    for k in range(10):
        mine, theirs, g = torch.ones(50), torch.ones(50), torch.randn(50)
        compiled(mine, g, kind(0.1 * (k + 1)))
        step(theirs, g, kind(0.1 * (k + 1)))
        torch.testing.assert_close(mine, theirs)
    assert counter.frame_count <= 2


def test_op_calls_are_counted_by_who_computes_them() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.special.i0((x @ w).relu().t()).sum()

    report = lenz.explain(f)(torch.randn(4, 5), torch.randn(5, 6))
    assert report.graphs[0].calls["aten.mm.default"] == 1
    assert sum(report.graphs[0].calls.values()) == 5
    native, library, fallback = report.op_calls
    assert library == 1 and fallback == len(report.graphs[0].fallbacks)
    assert native == 5 - library - fallback
