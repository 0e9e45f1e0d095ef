"""A seeded sample of random programs; `make fuzz` runs as many as the time allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from tests.fuzz.check import Notes, failure
from tests.fuzz.compare import outcome, same
from tests.fuzz.generator import BREAK, program
from tests.fuzz.program import Line, Machine, Program, Refused, Spec, analyse
from tests.fuzz.shrink import shrink

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of odd programs


def check(seeds: Sequence[int], way: str, large: bool = False, long: bool = False) -> None:
    for seed in seeds:
        p = program(seed, large, long)
        why = failure(p, way)
        assert not why, f"{p}\n{why}"


@pytest.mark.one_in(6)
@pytest.mark.parametrize("first", range(0, 18, 3))
def test_every_stage_gives_what_eager_gives(first: int) -> None:
    check(range(first, first + 3), "oracle")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", (1000, 1004))
def test_large_sizes_give_what_eager_gives(first: int) -> None:
    check(range(first, first + 4), "cpu", large=True)


def test_long_rows_give_what_eager_gives() -> None:
    check(range(1100, 1104), "cpu", long=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", (300, 302))
def test_threads_that_call_one_function_get_their_own_results(first: int) -> None:
    check(range(first, first + 2), "threads")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", range(2))
def test_steps_of_training_are_those_of_eager(part: int) -> None:
    seeds = [s for s in range(400, 440) if program(s).grad][part:4:2]
    check(seeds, "steps")


def test_kernels_touch_nothing_outside() -> None:
    check(range(100, 106), "guarded")


@pytest.mark.parametrize("columns", (128, 64, 50, 7))
@pytest.mark.parametrize("way", ("guarded", "guarded avx2", "guarded sse2"))
def test_rows_that_are_requested_early_have_numbers(way: str, columns: int) -> None:
    """The number 16 rows ahead is read, but no number behind the last one: these end a page."""
    numbers = Spec("a0", (7, 21), torch.int64, "", 1)
    table = Spec("a1", (9, columns), torch.float32, "", 2)
    text = "t0 = F.embedding_bag(a0 + 4, a1, mode='sum')"
    p = Program((numbers, table), (Line(text, "t0", ("a0", "a1"), ""),), ("t0",))
    assert not failure(p, way)


@pytest.mark.parametrize("way", ("triton", "tiny"))
def test_triton_kernels_give_what_the_graph_gives(way: str) -> None:
    pytest.importorskip("triton")
    check(range(200, 204), way)


def whole(text: str, *flags: str) -> Program:
    """A program of one whole 3 x 4 argument."""
    lines = tuple(
        Line(line, line.split(" = ")[0], ("a0",), "".join(flags)) for line in text.splitlines()
    )
    a = Spec("a0", (3, 4), torch.float32, "", 1)
    return Program((a,), lines, tuple(x.target for x in lines))


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: [t + 1 for t in gm(*args)]

    p = whole("t0 = a0.sum(1)")
    assert not failure(p)
    monkeypatch.setattr("tests.fuzz.check.Stages.backend", lambda self, gm, xs: wrong(gm, xs))
    assert "result t0: -1.0 instead of -2.0" in failure(p, "cpu")
    assert "result t0: -1.0 instead of -2.0" in failure(p, "threads")
    trained = replace(p, specs=(replace(p.specs[0], grad=True),))
    assert "loss 0" in failure(trained, "steps")


def test_strides_are_looked_for_where_there_are_values_in_the_way() -> None:
    """An argument of one element was drawn among fake tensors, which have no value to index by."""
    p = whole("t0 = torch.ops.fuzz.turned(a0)\nt1 = t0[1:]")
    p = replace(p, specs=(*p.specs, Spec("a1", (), torch.float32, "", 1, "edges")))
    looks = Line("assert a0[0, 0].item() < 9", "", ("a0",), "b")
    for q in (p, replace(p, lines=(*p.lines, looks))):
        assert not failure(q, "cpu")


def test_a_program_may_be_several_graphs() -> None:
    p = whole("t0 = a0 + 1\nt1 = t0[1:]\nt2 = t1.mul_(2)")
    cut = replace(p, lines=(*p.lines[:2], BREAK, *p.lines[2:]), results=("t0", "t1"))
    assert not cut.whole and analyse(cut) is not None
    seen: list[str] = []
    notes = Notes(seen)
    assert not failure(cut, "cpu", notes=notes) and not notes.skipped
    assert seen.count("aten.add.Tensor") == 1 and "aten.mul.Tensor" in seen


def test_rounded_values_are_held_against_float64() -> None:
    z = torch.full((4,), 1 / 3, dtype=torch.float64)
    y = z.bfloat16()
    same(y, y, z, False)
    same(torch.full((4,), 0.3330078125).bfloat16(), y, z, False)
    with pytest.raises(AssertionError, match=r"ideally 0\.33"):
        same(torch.full((4,), 0.5).bfloat16(), y, z, False)
    with pytest.raises(AssertionError, match="which is exact"):
        same(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0]), True)


def test_an_error_is_of_the_coarsest_type_on_the_way() -> None:
    """A sum in float64 of logarithms in float32 has the error of the latter."""
    lines = (
        Line("t0 = (a0.abs() + 1).log()", "t0", ("a0",), "r"),
        Line("t1 = t0.sum(dtype=torch.float64)", "t1", ("t0",), "r"),
        Line("t2 = a0.sum(dtype=torch.float64)", "t2", ("a0",), "r"),
    )
    m = analyse(Program(whole("t0 = a0").specs, lines, ("t1", "t2")))
    assert m is not None
    f32, f64 = (torch.finfo(t).eps for t in (torch.float32, torch.float64))
    assert (m.unit["a0"], m.unit["t0"], m.unit["t1"], m.unit["t2"]) == (0.0, f32, f32, f64)
    y = torch.tensor(3.0, dtype=torch.float64)
    same(y + 1e-6, y, y, False, f32)
    with pytest.raises(AssertionError, match="ideally"):
        same(y + 1e-6, y, y, False, f64)


def test_a_sum_whose_terms_cancel_may_be_off_by_their_rounding() -> None:
    """A layer norm of 10^5 numbers sums to zero: f32 is off by 1e-3 in the median, at most 5e-3."""
    unit, zero = float(torch.finfo(torch.float32).eps), torch.zeros((), dtype=torch.float64)
    same(torch.tensor(5e-3), torch.tensor(5e-4), zero, False, unit, 100_000)
    with pytest.raises(AssertionError, match="bound"):
        same(torch.tensor(7e-3), torch.tensor(5e-4), zero, False, unit, 100_000)
    with pytest.raises(AssertionError, match="bound"):
        same(torch.tensor(5e-3), torch.tensor(0.0), zero, False, unit, 100_000)


def test_aliasing_is_part_of_an_outcome() -> None:
    p = whole("t0 = a0[1:]\nt1 = a0 + 1")
    got = outcome(p, p.function(), p.arguments())
    assert got.shared == {("argument a0", "result t0")}


def test_a_rounding_may_not_decide() -> None:
    assert analyse(whole("t0 = a0.floor()", "e")) is not None
    p = whole("t0 = a0.exp()", "r")
    floor = Line("t1 = t0.floor()", "t1", ("t0",), "e")
    assert analyse(Program(p.specs, (*p.lines, floor), ("t1",))) is None


def test_what_is_too_large_is_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand million elements of one byte ended the process, and with it the hour."""
    ran: list[str] = []
    run = Machine.value
    seen = lambda m, line, env=None: (env is None and ran.append(line.text), run(m, line, env))[1]
    monkeypatch.setattr(Machine, "value", seen)
    row, many = Spec("a0", (1, 100_000), torch.bool, "", 1), (1,) * 33
    m = Machine(
        (row, replace(row, name="a1", base=(100_000, 1)), replace(row, name="a2", base=many))
    )
    for text, *reads in (("a0 ^ a1", "a0", "a1"), ("a2.repeat(*[2] * 33)", "a2")):
        with pytest.raises(Refused, match="too large"):
            m.run(Line(f"t0 = {text}", "t0", tuple(reads), ""))
    assert not ran
    m.run(Line("t0 = a0 & True", "t0", ("a0",), ""))
    assert ran == ["t0 = a0 & True"]


def test_a_failure_is_made_small() -> None:
    """A program in which only `prod` matters keeps one line and one result."""
    p = next(
        p for p in map(program, range(5000))
        if any(".prod(" in x.text for x in p.lines) and len(p.lines) > 5
    )  # fmt: skip
    small = shrink(p, "bad", lambda q: "bad" if ".prod(" in q.source() else "")
    assert len(small.lines) == 1 and len(small.results) == 1 and len(small.specs) == 1
    assert analyse(small) is not None
    exec(compile(small.script("'eager'"), "<script>", "exec"), {})


def test_the_same_seed_gives_the_same_program() -> None:
    assert str(program(7)) == str(program(7)) != str(program(8))


def test_the_backward_is_compiled_for_the_strides_that_are_saved() -> None:
    """The check told AOTAutograd of none, and the oracle refused what the forward had saved."""
    spec = Spec("a0", (1, 2, 2, 2), torch.bfloat16, ".permute(0, 3, 1, 2)", 3, "noise", grad=True)
    lines = (
        Line("t0 = a0.roll(-1, 1)", "t0", ("a0",), "p"),
        Line("t1 = torch.linalg.vector_norm(t0, 1, [0, 2, 3])", "t1", ("t0",), ""),
    )
    assert not failure(Program((spec,), lines, ("t1",)))


def test_the_backward_of_a_graph_taken_to_a_gpu_is_traced_on_the_cpu() -> None:
    """Fake tensors of the forward stayed on cuda:0, and the backward has some of them."""
    pytest.importorskip("triton")
    zeros = "torch.zeros_like(t0, dtype=torch.int64)"
    lines = (
        Line("t0 = a0.neg()", "t0", ("a0",), "p"),
        Line(f't1 = t0.scatter_reduce(-1, {zeros}, a0, "mean")', "t1", ("t0", "a0"), "r"),
        Line(f't2 = t1.scatter_reduce(0, {zeros}, t0.clamp(0, 1), "prod")', "t2", ("t1", "t0"), ""),
    )
    spec = Spec("a0", (1, 1), torch.float32, ".diagonal()", 3260000840, grad=True)
    assert not failure(Program((spec,), lines, ("t2",)), "tiny")


def test_what_the_forward_saves_keeps_gaps_of_other_sizes() -> None:
    """The second sizes are not those of the hints, and a part of a tensor was laid without gaps."""
    pytest.importorskip("triton")
    spec = Spec("a0", (2, 8, 8), torch.bfloat16, "", 3330001090, grad=True)
    lines = (
        Line("t0 = a0[:, 3:]", "t0", ("a0",), "p"),
        Line("t1 = torch.linalg.vector_norm(t0, 1, [0, 1, 2])", "t1", ("t0",), ""),
    )
    second = (replace(spec, base=(2, 5, 5)),)
    assert not failure(Program((spec,), lines, ("t1",), second, dynamic=True), "tiny")


def test_gradients_follow_what_autograd_is_given_where_a_dimension_is_one() -> None:
    """The trace has the strides of the result, and torch passes on a caller's own: (1, 6, 1, 1)."""
    spec = Spec(
        "a0", (1, 1, 6, 1), torch.float32, ".to(memory_format=torch.channels_last)", 1, grad=True
    )
    lines = (Line("t0 = a0.flip(0)", "t0", ("a0",), "p"),)
    assert not failure(Program((spec,), lines, ("t0",), dynamic=True), "cpu")
