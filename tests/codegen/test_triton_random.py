"""Random words of pairs of lanes: where one counter serves two, and that nobody can tell."""

from __future__ import annotations

import pytest
from gpu_oracle import TINY, assert_triton, kernels_of

from lenz.codegen.triton.kernel import emit
from lenz.ir.graph import Graph
from lenz.ir.kernel import Schedule
from lenz.ir.reader import read


def graph(shape: str, axes: str, number: str) -> Graph:
    g = read(f"""graph @g() on cpu {{
      in %s : i64[2]
      out %u = u32[{shape}] : map ({axes}) {{
        shared_bits(load(%s, [0]), load(%s, [1]), index({number}, i64))
      }}
    }}""")
    assert isinstance(g, Graph)
    return g


def in_pairs(s: Schedule) -> bool:
    return any("random_pairs" in emit(k).text for k in kernels_of(s))


@pytest.mark.parametrize(
    ("shape", "axes", "number", "pairs"),
    [
        ("5000", "i: 5000", "i", True),
        ("5001", "i: 5001", "i", True),
        ("7, 300", "i: 7, j: 300", "300*i + j", True),
        ("40, 6", "i: 40, j: 6", "6*i + j + 8", True),
        ("300, 8", "i: 300, j: 8", "300*j + i", False),
        ("3000", "i: 3000", "i + 1", False),
        ("3000", "i: 3000", "2*i", False),
        ("1", "i: 1", "i", False),
    ],
)
def test_pairs(shape: str, axes: str, number: str, pairs: bool) -> None:
    assert in_pairs(assert_triton(graph(shape, axes, number), seeds=(0, 1))) is pairs


def test_rows_of_an_odd_length_have_a_counter_per_lane() -> None:
    """In tiles of several rows a pair may lie in two of them."""
    s = assert_triton(graph("40, 7", "i: 40, j: 7", "8*i + j"), tiles=TINY)
    assert in_pairs(s)
    s = assert_triton(graph("40, 7", "i: 40, j: 7", "9*i + j"), tiles=TINY)
    assert not in_pairs(s)
