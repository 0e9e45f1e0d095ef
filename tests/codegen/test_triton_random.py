"""Random words of pairs of lanes: where one counter serves two, and that nobody can tell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from lenz import ops
from lenz.ir.dtype import F32, I64
from lenz.ir.expr import index, load
from lenz.ir.graph import Graph, Pointwise, Ref
from lenz.ir.kernel import Schedule
from lenz.ir.reader import read
from lenz.ir.tensor import Buffer, TensorType, axes_for, contiguous
from lenz.machine.cuda.triton.kernel import emit
from lenz.sym import ONE, ZERO, sym
from tests.gpu_oracle import TINY, assert_triton, cubins, kernels_of


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


@pytest.mark.diagonal(2)
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


def test_normal_numbers_of_neighbours(tmp_path: Path) -> None:
    """A thread computes the counter, the logarithm and the root of two neighbours once."""
    from triton import knobs

    seed = Buffer("seed", TensorType(I64, "cpu", contiguous((sym(2),))))
    for rows, columns, tiles in ((8, 512, None), (3, 501, None), (3, 501, TINY)):
        out = Buffer("out", TensorType(F32, "cpu", contiguous((sym(rows), sym(columns)))))
        axes = axes_for(out.type.shape)
        number = index(columns * axes[0].var + axes[1].var, I64)
        body = ops.normal(load("seed", (ZERO,), I64), load("seed", (ONE,), I64), number)
        g = Graph("normal", (seed,), (Pointwise(out, axes, body),), (Ref("out"),))
        # The counter carries into its upper word.
        s = assert_triton(g, given=[torch.tensor([-(2**40) + 5, 2**32 - 700])], tiles=tiles)
        if columns == 512:
            (binary,) = cubins(s)
            file = tmp_path / "kernel.cubin"
            file.write_bytes(binary.code)
            tool = [knobs.nvidia.nvdisasm.path, "-c", str(file)]
            text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
            # 1024 elements in 128 threads are four counters for each, of ten products: one
            # instruction in Triton 3.6, IMAD.HI and IMAD in 3.7. Other indices take up to four.
            products = text.count("IMAD.WIDE.U32") + text.count("IMAD.HI.U32")
            assert products <= 44, "80 would be a counter for each element"
            assert text.count("MUFU.RSQ") <= 5  # and one of the slow way, for denormals
