"""The shapes to choose from: few, all different, and every kernel of them right."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from lenz.ir.graph import Graph
from lenz.ir.kernel import For, Kernel, KernelKind, Launch, Schedule, walk
from lenz.ir.reader import read
from lenz.ir.verify import verify
from lenz.machine.cuda.shape import Shape
from lenz.machine.cuda.triton.compile import compile_text
from lenz.machine.cuda.triton.kernel import emit
from lenz.machine.cuda.tune.bench import example_args, restoring
from lenz.machine.cuda.tune.search import Choice, config
from lenz.machine.cuda.tune.space import space
from lenz.pipeline import optimise
from lenz.schedule import schedule
from tests.gpu_oracle import gpu_context, on_gpu
from tests.oracle import assert_schedule

KINDS: tuple[KernelKind, ...] = get_args(KernelKind)
SIZES = [0, 1, 2, 7, 64, 100, 768, 1000, 1024, 1025, 2048, 4096, 8192, 30000, 32768, 65536, 1 << 28]


def candidates(text: str) -> tuple[Schedule, list[Launch]]:
    """The schedule of a graph on cuda:0, and its launches, with their different candidates."""
    g = read(text)
    assert isinstance(g, Graph)
    cx = gpu_context()
    s = schedule(optimise(on_gpu(g), cx), cx, space)
    steps = tuple(
        replace(x, candidates=tuple(dict.fromkeys(x.candidates))) if isinstance(x, Launch) else x
        for x in s.steps
    )
    return replace(s, steps=steps), [x for x in steps if isinstance(x, Launch)]


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_few_and_different_and_possible(kind: KernelKind) -> None:
    for rows in SIZES:
        for length in SIZES:
            shapes = space(kind, rows, length)
            assert 3 <= len(shapes) <= 13, (rows, length)
            assert len(set(shapes)) == len(shapes), (rows, length)
            assert all(1 <= x.warps <= 32 and 1 <= x.stages <= 3 for x in shapes)
            assert space(kind, rows, length) == shapes


ELEMENTS = """
graph @g() on cpu {
  in %x : f32[ROWS, LENGTH]
  in %b : f32[LENGTH]
  out %y = f32[ROWS, LENGTH] : map (i: ROWS, j: LENGTH) { add(load(%x, [i, j]), load(%b, [j])) }
}
"""
TRANSPOSE = """
graph @g() on cpu {
  in %x : f32[LENGTH, ROWS]
  in %z : f32[ROWS, LENGTH]
  out %y = f32[ROWS, LENGTH] : map (i: ROWS, j: LENGTH) {
    add(load(%x, [j, i]), load(%z, [i, j]))
  }
}
"""
ARGMAX = """
graph @g() on cpu {
  in %x : f32[ROWS, LENGTH]
  out %m = i64[ROWS] : reduce argmax (i: ROWS | r: LENGTH) { load(%x, [i, r]) }
}
"""
SOFTMAX = """
graph @g() on cpu {
  in %x : f32[ROWS, LENGTH]
  %m = f32[ROWS] : reduce max (i: ROWS | r: LENGTH) { load(%x, [i, r]) }
  %e = f32[ROWS, LENGTH] : map (i: ROWS, j: LENGTH) { exp(sub(load(%x, [i, j]), load(%m, [i]))) }
  %d = f32[ROWS] : reduce sum (i: ROWS | r: LENGTH) { load(%e, [i, r]) }
  out %y = f32[ROWS, LENGTH] : map (i: ROWS, j: LENGTH) { div(load(%e, [i, j]), load(%d, [i])) }
}
"""
COLUMNS = """
graph @g() on cpu {
  in %x : f32[LENGTH, ROWS]
  out %y = f32[ROWS] : reduce sum (i: ROWS | r: LENGTH) { load(%x, [r, i]) }
}
"""
CASES = [
    (ELEMENTS, "pointwise", 40, 70),
    (TRANSPOSE, "transpose", 40, 70),
    (SOFTMAX, "reduction", 30, 70),
    (SOFTMAX, "reduction", 2, 1500),
    (COLUMNS, "outer_reduction", 70, 40),
]


def filled(text: str, rows: int, length: int) -> str:
    return text.replace("ROWS", str(rows)).replace("LENGTH", str(length))


@pytest.mark.parametrize(("text", "kind", "rows", "length"), CASES)
def test_every_candidate_does_what_the_graph_does(
    text: str, kind: str, rows: int, length: int
) -> None:
    s, launches = candidates(filled(text, rows, length))
    assert kind in {x.kernel.kind for x in launches}
    tried = max(len(x.candidates) for x in launches)
    for n in range(tried):
        steps = tuple(
            replace(x, kernel=x.candidates[n % len(x.candidates)]) if isinstance(x, Launch) else x
            for x in s.steps
        )
        assert_schedule(replace(s, steps=steps), seeds=(0,))


LARGE = [
    (ELEMENTS, "pointwise", 8192, 8192, 7),
    (TRANSPOSE, "transpose", 8192, 8192, 7),
    (SOFTMAX, "reduction", 65536, 64, 10),
    (SOFTMAX, "reduction", 65536, 512, 10),
    (SOFTMAX, "reduction", 8192, 2000, 7),
    (SOFTMAX, "reduction", 8192, 8192, 5),
    (SOFTMAX, "reduction", 2048, 32768, 9),
    (SOFTMAX, "reduction", 1024, 50257, 5),  # in parts, which programs hold
    (ARGMAX, "reduction", 1024, 50257, 10),  # in a loop
    (COLUMNS, "outer_reduction", 4096, 500, 9),
    (COLUMNS, "outer_reduction", 300, 200, 7),
]


@pytest.mark.parametrize(("text", "kind", "rows", "length", "least"), LARGE)
def test_large_kernels_have_a_choice(
    text: str, kind: str, rows: int, length: int, least: int
) -> None:
    _, launches = candidates(filled(text, rows, length))
    found = [x for x in launches if x.kernel.kind == kind and len(x.candidates) > 1]
    assert found, [(x.kernel.kind, len(x.candidates)) for x in launches]
    assert max(len(x.candidates) for x in found) >= least, [len(x.candidates) for x in found]
    for x in found:
        assert x.candidates[0] == x.kernel, "the first is that of the cost model"
        names = [config(k) for k in x.candidates]
        assert len(set(names)) == len(names), names
        for k in x.candidates:
            assert (k.params, k.sizes, k.name) == (x.kernel.params, x.kernel.sizes, x.kernel.name)


def is_looped(k: Kernel) -> bool:
    """Whether a program walks over its row, and does not hold all of it."""
    return any(isinstance(x, For) and x.kind == "seq" for x in walk(k.body))


@pytest.mark.parametrize(("text", "length"), [(SOFTMAX, 16384), (SOFTMAX, 32768), (ARGMAX, 40000)])
def test_long_rows_are_held_or_looped_by_measurement(text: str, length: int) -> None:
    (launch,) = candidates(filled(text, 2048, length))[1]
    found = [is_looped(k) for k in launch.candidates]
    assert {*found} == {False, True}, [config(k) for k in launch.candidates]


def test_the_workspace_of_a_scan_is_large_enough_for_every_candidate() -> None:
    s, (launch,) = candidates(
        "graph @g() on cpu { in %x : f32[16777216]\n"
        "out %y = f32[16777216] : scan sum (i: 16777216) over i { load(%x, [i]) } }"
    )
    assert len(launch.candidates) >= 7
    for k in launch.candidates:
        verify(k)  # no part of a row is beyond the end of the workspace
        assert k.params[-1].mode == "work" and k.params[-1].size.hi
    choice = Choice(launch.candidates, s.graph.env)
    given = example_args(choice.widest(), s.graph.env, torch.device("cpu"))
    needed = [s.graph.env.hint(k.params[-1].size) for k in launch.candidates]
    assert given[-1].numel() == max(needed) > min(needed) and not given[-1].any()
    given[-1].fill_(1)
    restore = restoring(choice.widest(), given)
    assert restore is not None
    restore()
    assert not given[-1].any(), "each run of a kernel that is measured finds a zeroed workspace"


def test_the_shape_by_default_is_the_cost_model() -> None:
    _, (launch,) = candidates(filled(SOFTMAX, 8192, 8192))
    assert isinstance(launch.kernel, Kernel)
    assert config(launch.kernel) == f"r0 8192, {8192 // 512} warps"
    assert Shape() == Shape(tile=1024, row=32768), "sizes that were measured"


def test_candidates_compile_without_spills() -> None:
    pytest.importorskip("triton")
    _, (launch,) = candidates(filled(TRANSPOSE, 4096, 4096))
    smallest, *_, largest = sorted(launch.candidates, key=lambda k: k.tile.warps)
    for k in (smallest, largest):
        made = compile_text(emit(k), 90)
        assert made.warps == k.tile.warps and made.spills == 0, config(k)
