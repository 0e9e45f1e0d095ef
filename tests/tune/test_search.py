"""What is chosen, what is dropped, what is remembered, and what the report says of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lenz
from lenz.debug.report import Tried, TuneReport
from lenz.errors import InternalError
from lenz.ir.binary import Binary
from lenz.ir.expr import nodes_of
from lenz.ir.graph import Graph
from lenz.ir.kernel import Kernel, Launch, Schedule, exprs_of
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.machine.cuda.triton.compile import KernelText
from lenz.machine.cuda.triton.pool import Failed
from lenz.machine.cuda.tune import search
from lenz.machine.cuda.tune.bench import example_args
from lenz.machine.cuda.tune.search import config, confined, tune
from lenz.machine.cuda.tune.space import space
from lenz.options import Options
from lenz.pipeline import kernels_of, named, optimise
from lenz.runtime.store import Store
from lenz.schedule import schedule
from lenz.sym import SymEnv, Var
from tests.gpu_oracle import gpu_context, on_gpu
from tests.tune.fake_gpu import FakeGpu

TWO = """
graph @two() on cpu {
  in %x : f32[64, 1000]
  %m = f32[64] : reduce max (i: 64 | r: 1000) { load(%x, [i, r]) }
  %e = f32[64, 1000] : map (i: 64, j: 1000) { exp(sub(load(%x, [i, j]), load(%m, [i]))) }
  out %y = f32[64] : reduce sum (i: 64 | r: 1000) { load(%e, [i, r]) }
  out %z = f32[1000000] : map (i: 1000000) { 2.0:f32 }
}
"""
TWICE = """
graph @twice(s0: 1..) on cpu {
  in %x : f32[s0]
  in %w : f32[s0]
  out %y = f32[s0] : map (i: s0) { sqrt(load(%x, [i])) }
  out %z = f32[s0] : map (i: s0) { sqrt(load(%w, [i])) }
}
"""


def prepared(text: str, *hints: int) -> Schedule:
    """The schedule of a graph on cuda:0 with candidates, its kernels numbered."""
    g = read(text)
    assert isinstance(g, Graph)
    env = g.env
    for v, hint in zip(env.ranges, hints, strict=True):
        env = env.with_var(v, hint)
    cx = replace(gpu_context(), options=Options(horizontal=False))
    return named(schedule(optimise(on_gpu(replace(g, env=env)), cx), cx, space))


def launches(s: Schedule) -> list[Launch]:
    return [x for x in s.steps if isinstance(x, Launch)]


class Compiler:
    """Stands in for the compile server: the code of a kernel is its text."""

    def __init__(self, refuses: Callable[[KernelText], bool] = lambda _: False) -> None:
        self.refuses = refuses
        self.batches: list[list[KernelText]] = []

    def __call__(
        self, kernels: Sequence[KernelText], arch: int, store: Any
    ) -> list[Binary | Failed]:
        if kernels:
            self.batches.append(list(kernels))
        return [
            Failed(k.name, "no such luck")
            if self.refuses(k)
            else Binary(k.name, k.text.encode(), k.warps, 0, 2, 32, 0)
            for k in kernels
        ]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(search, "compile_all", made)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def fewest_warps(b: Binary) -> float:
    """Times that prefer few warps."""
    return 10.0 * b.warps + len(b.code) % 7


def test_the_fastest_candidate_replaces_the_kernel(compiler: Compiler) -> None:
    s = prepared(TWO)
    gpu = FakeGpu(fewest_warps)
    tuned, reports = tune(s, None, lambda _: gpu)
    assert len(reports) == len(launches(s)) == 2
    for report, before, after in zip(reports, launches(s), launches(tuned), strict=True):
        different = tuple(dict.fromkeys(before.candidates))
        times = [t.us for t in report.tried]
        assert None not in times and len(times) == len(different) > 3
        assert times[report.chosen] == min(x for x in times if x is not None)
        want = different[report.chosen]
        assert after.kernel == replace(want, name=before.kernel.name)
        assert after.candidates == () and after.args == before.args
        assert report.kernel == after.kernel.name and not report.remembered
        assert [t.config for t in report.tried] == [config(k) for k in different]
        assert len({t.config for t in report.tried}) == len(times), "two tiles have one name"


def test_a_graph_is_compiled_in_one_batch(compiler: Compiler) -> None:
    s = prepared(TWO)
    tune(s, None, lambda _: FakeGpu())
    (batch,) = compiler.batches
    assert len(batch) == sum(len(set(x.candidates)) for x in launches(s))
    assert {k.name for k in batch} == {x.kernel.name for x in launches(s)}


def test_a_launch_has_the_grid_and_arguments_of_its_candidate(compiler: Compiler) -> None:
    gpu = FakeGpu()
    s = prepared(TWICE, 100_000)
    tune(s, None, lambda _: gpu)
    assert {a[-1] for a in gpu.arguments} == {100_000}, "the size is the example's"
    grids = {a[0] for a in gpu.arguments}
    assert grids == {-(-100_000 // t) for t in (512, 1024, 2048, 4096)}


def test_equal_kernels_are_measured_once_and_all_replaced(compiler: Compiler) -> None:
    s = prepared(TWICE, 4096)
    assert len(launches(s)) == 2
    tuned, reports = tune(s, None, lambda _: FakeGpu(lambda b: 1.0 if b.warps == 8 else 2.0))
    assert len(reports) == 1
    first, second = launches(tuned)
    assert first.kernel is second.kernel and first.kernel.tile.warps == 8
    assert kernels_of(tuned) == {first.kernel.name: (first.kernel, "cuda:0")}


def test_where_all_tiles_are_one_nothing_is_measured(compiler: Compiler) -> None:
    s = prepared(TWICE, 4096)
    same = tuple(
        replace(x, candidates=(x.kernel,) * 3) if isinstance(x, Launch) else x for x in s.steps
    )
    gpu = FakeGpu()
    tuned, reports = tune(replace(s, steps=same), None, lambda _: gpu)
    assert (reports, gpu.calls, compiler.batches) == ((), [], [])
    assert all(x.candidates == () for x in launches(tuned))


POSITIONS = """
kernel @k pointwise (%a: in i64[500], %b: in f32[{n}], %c: out f32[500]{sizes}) {{
  for i in 512 below 500 : lane {{
    store(%c, [i], load(%b, [@0]; @0: 0..{end} = sub(load(%a, [i]), 1:i64)))
  }}
}}
"""
CLAMPED = """
graph @clamped() on cpu {
  in %x : f32[8, 1000]
  in %w : f32[3, 65536]
  %n = i64[8] : reduce sum (i: 8 | r: 1000) { cast(gt(load(%x, [i, r]), 0.0:f32), i64) }
  out %p = i64[8] : map (i: 8) { minimum(maximum(load(%n, [i]), 0:i64), 2:i64) }
  out %y = f32[8, 65536] : map (i: 8, j: 65536) {
    load(%w, [@0, j]; @0: 0..2 = assert_in_range(load(%p, [i]), 3:i64))
  }
}
"""


@pytest.mark.parametrize("size", ["3", "s0"])
def test_positions_without_a_check_are_confined_to_random_arguments(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another kernel has clamped them to 1 .. 3, and nobody clamps random numbers."""
    pytest.importorskip("triton")
    from tests.gpu_oracle import interpreted
    from tests.triton_interpreter import Machine

    monkeypatch.setattr(Machine, "create_assert", lambda *_: None)  # kernels are timed without
    sizes, end = ("; s0: 1..", " < s0") if size == "s0" else ("", "2")
    k = read(POSITIONS.format(n=size, sizes=sizes, end=end))
    assert isinstance(k, Kernel)
    env = SymEnv().with_var(Var("s0", 1, None), 3)
    inside = confined(k, env)
    tensors = example_args(inside, env, torch.device("cpu"))
    assert (tensors[0] == 0).any(), "the position before the first is among them"
    given = {p.name: t for p, t in zip(k.params, tensors, strict=True)}
    interpreted(inside, given, {"s0": 3})


def test_what_is_measured_is_confined(compiler: Compiler) -> None:
    s = prepared(CLAMPED)
    (k,) = [x.kernel for x in launches(s) if "y" in x.kernel.name]
    assert all(not e.op.guarded for e in nodes_of(*exprs_of(k.body))), "the check is needless"
    tune(s, None, lambda _: FakeGpu(fewest_warps))
    texts = [t.text for t in compiler.batches[0] if t.name == k.name]
    assert texts and all("tl.uint64) <" in t for t in texts)


def test_noise_does_not_replace_the_cost_model(compiler: Compiler) -> None:
    s = prepared(TWO)
    usual = {x.kernel.name: x.kernel for x in launches(s)}
    turns = iter(range(100_000))
    tuned, reports = tune(s, None, lambda _: FakeGpu(lambda _: 100.0 - 1e-5 * next(turns)))
    assert all(r.chosen == 0 for r in reports)
    assert all(x.kernel == usual[x.kernel.name] for x in launches(tuned))


def test_what_does_not_compile_is_dropped(compiler: Compiler) -> None:
    compiler.refuses = lambda k: k.warps != 8
    tuned, reports = tune(prepared(TWO), None, lambda _: FakeGpu())
    for report in reports:
        assert report.tried[report.chosen].us is not None
        assert {t.why for t in report.tried if t.us is None} == {"no such luck"}
    assert {x.kernel.tile.warps for x in launches(tuned)} == {8}


def test_what_cannot_be_emitted_is_dropped(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    emit = search.emit  # type: ignore[attr-defined]

    def fails(k: Any, *arch: Any) -> KernelText:
        if k.tile.warps == 8:
            raise InternalError("lanes share an element")
        return emit(k, *arch)

    monkeypatch.setattr(search, "emit", fails)
    _, reports = tune(prepared(TWO), None, lambda _: FakeGpu())
    whys = [t.why for r in reports for t in r.tried if t.us is None]
    assert whys and set(whys) == {"lanes share an element"}


def test_what_the_driver_refuses_is_dropped(compiler: Compiler) -> None:
    def took(b: Binary) -> float:
        if b.warps > 4:
            raise RuntimeError("launching k: too many resources requested for launch\nmore")
        return 5.0 * b.warps

    tuned, reports = tune(prepared(TWO), None, lambda _: FakeGpu(took))
    for report, step in zip(reports, launches(tuned), strict=True):
        whys = {t.why for t in report.tried if t.us is None}
        assert whys == {"launching k: too many resources requested for launch"}
        assert step.kernel.tile.warps <= 4


def test_a_broken_gpu_is_an_error(compiler: Compiler) -> None:
    gpu = FakeGpu()

    def took(_: Binary) -> float:
        gpu.broken = True
        raise RuntimeError("an illegal memory access was encountered")

    gpu.took = took
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tune(prepared(TWO), None, lambda _: gpu)


def test_without_memory_the_cost_model_decides(
    compiler: Compiler, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arguments(*_: Any) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 EiB")

    s = prepared(TWO)
    with monkeypatch.context() as patch:
        patch.setattr(search, "example_args", arguments)
        tuned, reports = tune(s, store, lambda _: FakeGpu())
    assert all(r.chosen == 0 and r.tried[0].why == "CUDA out of memory." for r in reports)
    assert [x.kernel for x in launches(tuned)] == [x.kernel for x in launches(s)]
    assert "CUDA out of memory." in str(reports[0])
    _, again = tune(s, store, lambda _: FakeGpu())
    assert not any(r.remembered for r in again), "a lack of memory is remembered"


def test_a_second_process_measures_and_compiles_nothing(compiler: Compiler, store: Store) -> None:
    s = prepared(TWO)
    first, reports = tune(s, store, lambda _: FakeGpu(fewest_warps))
    compiler.batches.clear()
    gpu = FakeGpu()
    second, again = tune(prepared(TWO), store, lambda _: gpu)
    assert gpu.calls == [] and compiler.batches == []
    assert show(second) == show(first)
    assert all(r.remembered for r in again)
    assert [replace(r, remembered=False) for r in again] == list(reports)


def test_only_what_is_new_is_measured(compiler: Compiler, store: Store) -> None:
    tune(prepared(TWICE, 4096), store, lambda _: FakeGpu())
    compiler.batches.clear()
    _, reports = tune(prepared(TWICE, 1 << 20), store, lambda _: FakeGpu())
    assert not reports[0].remembered, "another size is another question"
    gpu = FakeGpu()
    gpu.name = "Another GPU"
    _, reports = tune(prepared(TWICE, 4096), store, lambda _: gpu)
    assert not reports[0].remembered, "another GPU is another question"
    _, reports = tune(prepared(TWICE, 4096), store, lambda _: FakeGpu())
    assert reports[0].remembered


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"null", b"\xff", b'{"chosen": 99, "tried": []}',
     b'{"chosen": 0, "tried": [["another tile", 1.0, ""]]}', b'{"chosen": 0, "tried": [[1]]}'],
)  # fmt: skip
def test_what_another_version_kept_is_a_miss(
    compiler: Compiler, store: Store, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(store.__class__, "get", lambda *_: content)
    _, reports = tune(prepared(TWICE, 4096), store, lambda _: FakeGpu())
    assert [r.remembered for r in reports] == [False]


def test_a_choice_out_of_range_is_a_miss(
    compiler: Compiler, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[bytes] = []
    monkeypatch.setattr(Store, "put", lambda self, kind, key, data: kept.append(data))
    tune(prepared(TWICE, 4096), store, lambda _: FakeGpu())
    content = json.loads(kept[0])
    assert sorted(content) == ["chosen", "tried"] and content["chosen"] == 0
    for chosen in (-1, 1 << 20, None, "0"):
        data = json.dumps({**content, "chosen": chosen}).encode()
        monkeypatch.setattr(Store, "get", lambda *_, data=data: data)
        _, reports = tune(prepared(TWICE, 4096), store, lambda _: FakeGpu())
        assert not reports[0].remembered, f"{chosen} is taken for a number of a candidate"


def test_candidates_compile_for_a_real_gpu() -> None:
    pytest.importorskip("triton")
    gpu = FakeGpu()
    s = prepared(TWO)
    few = tuple(replace(x, candidates=tuple(dict.fromkeys(x.candidates))[:2]) for x in launches(s))
    _, reports = tune(replace(s, steps=few), None, lambda _: gpu)
    assert [t for r in reports for t in r.tried if t.us is None] == []
    assert gpu.count("load") == 4


def test_the_report_names_what_was_chosen() -> None:
    tried = (Tried("p0 512, 4 warps", 20.0), Tried("p0 1024, 4 warps", 10.0))
    text = str(TuneReport("k", 1, tried))
    assert text == "k: 10.0 us with p0 1024, 4 warps, 20.0 us with p0 512, 4 warps"
    assert str(TuneReport("k", 0, tried)) == "k: 20.0 us with p0 512, 4 warps"


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_on_a_cpu_there_is_nothing_to_choose(mode: str) -> None:
    x = torch.rand(8, 100)
    got = torch.compile(lambda x: x.softmax(-1), backend="lenz", mode=mode)(x)
    torch.testing.assert_close(got, x.softmax(-1))
    report = lenz.explain(lambda x: x.softmax(-1), options={"autotune": True})(x)
    assert [g.autotune for g in report.graphs] == [()]
    assert "tune" in report.graphs[0].timings
