"""Rows on GPUs whose length is not known: held as those of the first call are, or in a loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lenz.frontend.build import build
from lenz.ir.graph import Graph
from lenz.ir.kernel import If, walk
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.machine.cuda.shape import Shape
from lenz.machine.cuda.triton.kernel import emit
from tests.cuda import cuda_program
from tests.gpu_oracle import (
    TINY,
    assert_kernels,
    kernels_of,
    lowered_there,
    native_ops,
    on_gpu,
    scheduled,
    texts_of,
)
from tests.lower.harness import trace

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x: F.gelu(F.layer_norm(x, x.shape[-1:])),
    "greatest": lambda x: (x - x.amax(-1, keepdim=True)).sum(-1),
    "place": lambda x: x - x.argmax(-1, keepdim=True),
    "columns": lambda x: torch.softmax(x, 0),
    "both axes": lambda x: F.layer_norm(x[None], x.shape),
    "place in all": lambda x: x.view(-1) - x.argmax() + x.sum(),
    "sums": lambda x: x.sum(0),
}
SIZES = ((5, 9), (2, 2), (2, 3), (4, 16), (5, 17), (3, 100), (40, 5))


def test_rows_up_to_an_eighth_of_the_lanes_above_the_first() -> None:
    """Rows of 150 have 256 lanes: up to 160 elements are held, 161 and more are walked over."""
    gm = trace(FUNCTIONS["softmax"], (torch.randn(3, 150),), True)
    g = lowered_there(build(gm, [], "inference", "test", native=native_ops()))
    s = scheduled(on_gpu(g))
    for n in (2, 127, 150, 160, 161, 256, 257):
        assert_kernels(s, g, given=(torch.randn(3, n),))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("tiles", [None, TINY])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_of_any_length(name: str, tiles: Shape | None) -> None:
    """Shorter than those of the first call, as long, and longer than the lanes of a program."""
    gm = trace(FUNCTIONS[name], (torch.randn(5, 9),), True)
    g = lowered_there(build(gm, [], "inference", "test", native=native_ops()))
    s = scheduled(on_gpu(g), tiles)
    for k in kernels_of(s):
        assert read(show(k)) == k
    for shape in SIZES:
        assert_kernels(s, g, given=(torch.randn(*shape),))


EMPTY = """
graph @g(s0: 0.., s1: 0..) on cuda:0 {
  hint (s0: 3, s1: 7)
  in %x : f32[s0, s1]
  %m = f32[s0] : reduce max (i: s0 | r: s1) { load(%x, [i, r]) }
  out %s = f32[s0] : reduce sum (i: s0 | r: s1) { sub(load(%x, [i, r]), load(%m, [i])) }
  out %y = f32[s0, s1] : map (i: s0, j: s1) { sub(load(%x, [i, j]), load(%m, [i])) }
}
"""


@pytest.mark.parametrize("tiles", [None, TINY])
def test_empty_rows_and_no_rows(tiles: Shape | None) -> None:
    g = read(EMPTY)
    assert isinstance(g, Graph)
    s = scheduled(g, tiles)
    assert " if s1 < " in show(s)
    for shape in ((3, 0), (0, 4), (0, 0), (1, 1), (3, 1), (1, 20)):
        assert_kernels(s, g, given=(torch.randn(*shape),))


@pytest.mark.parametrize("n", [500, 501])
def test_a_row_that_is_held_is_read_once(n: int) -> None:
    p = cuda_program(lambda x: torch.softmax(x, -1), (4096, n), dynamic=True)
    (k,) = kernels_of(scheduled(lowered_there(p)))
    text = emit(k).text
    assert sum(isinstance(s, If) for s in walk(k.body)) == 1
    held, looped = text[: text.index("for r0b")], text[text.index("for r0b") :]
    assert held.count("tl.load(") == 1 and looped.count("tl.load(") == 3
    assert "[:, None, None]" not in text, "both have the same lanes"


def test_lanes_that_no_held_row_has_are_known_to_be_idle() -> None:
    p = cuda_program(lambda x: torch.softmax(x, -1), (4096, 2051), dynamic=True)
    (k,) = kernels_of(scheduled(lowered_there(p)))
    assert "(r0 < 2560) & (r0 < " in emit(k).text, "not all 4096 lanes compute"


def test_elements_of_odd_rows_are_at_constant_distances_from_one_pointer() -> None:
    def text_of(n: int) -> str:
        p = cuda_program(lambda x: torch.softmax(x, -1), (4096, n))
        (text,) = texts_of(scheduled(lowered_there(p)))
        return text

    assert "(a0 + (8191 * p0)) + r0" in text_of(8191)
    assert "a0 + ((8192 * p0) + r0)" in text_of(8192)
