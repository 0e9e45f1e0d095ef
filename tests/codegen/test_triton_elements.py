"""Triton kernels without reductions: broadcasting, layouts, views, gathers, guarded loads, casts.

Every case runs in Triton's interpreter, which watches memory, with the usual tiles and with tiny
ones; sizes divide the tiles or not, and are 0 and 1 too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lenz.ir.kernel import For, walk
from lenz.ir.reader import read
from tests.gpu_oracle import (
    TINY,
    assert_function,
    assert_triton,
    cubins,
    kernels_of,
    kinds_of,
    on_gpu,
    scheduled,
    texts_of,
)

pytest.importorskip("triton")

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
FLAT = ((), (0,), (1,), (5,), (1024,), (1500,), (2, 0, 3), (3, 5), (2, 1030), (3, 4, 5), (1, 1, 1))
EDGES = ((16, 16), (17, 33), (32, 32), (17, 65), (64, 64), (70, 130), (100, 20))


def tensor(*shape: int) -> torch.Tensor:
    """Numbers that are the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def both(fn: Callable[..., Any], *inputs: Any) -> list[str]:
    """Check a function with the usual tiles and with tiny ones; the kinds of the usual kernels."""
    usual = assert_function(fn, *inputs)
    assert_function(fn, *inputs, tiles=TINY)
    return kinds_of(usual)


@pytest.mark.parametrize("shape", FLAT, ids=str)
def test_elements(shape: tuple[int, ...]) -> None:
    kinds = both(lambda x, y: ((x + y).relu() * 2, x > y), tensor(*shape), tensor(*shape))
    assert kinds == ["pointwise"], "both results share a kernel"


@pytest.mark.parametrize(
    "shapes",
    [((7, 1, 5), (3, 1)), ((33, 1), (1, 70)), ((4, 6), (6,)), ((2, 3, 1), ()), ((0, 4), (1, 4))],
    ids=str,
)
def test_broadcasting(shapes: tuple[tuple[int, ...], ...]) -> None:
    both(lambda x, y: x * y + 1, *[tensor(*s) for s in shapes])


@pytest.mark.parametrize("n,m", EDGES)
def test_transposes_have_tiles_in_two_axes(n: int, m: int) -> None:
    tiles = TINY if n * m < 1200 else None
    for fn, inputs in (
        (lambda x, y: x.t() + y, (tensor(n, m), tensor(m, n))),
        (lambda x: x.transpose(1, 2).contiguous() + 1, (tensor(2, n, m),)),
    ):
        kind = "transpose" if n * m >= 1024 else "pointwise"
        assert kinds_of(assert_function(fn, *inputs)) == [kind]
        assert_function(fn, *inputs, tiles=tiles)


def test_channels_last_beside_contiguous() -> None:
    x, y = tensor(2, 20, 9, 8), tensor(2, 20, 9, 8)
    x = x.to(memory_format=torch.channels_last)
    assert both(lambda x, y: x + y, x, y) == ["transpose"]
    assert both(lambda x, y: (x * y).relu(), y, x) == ["transpose"]
    assert both(lambda x, y: x.relu() + y, x, x * 2) == ["pointwise"]


STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "every third": lambda: tensor(10, 20)[:, ::3],
    "a part": lambda: tensor(10, 20)[2:, 1:],
    "expanded": lambda: tensor(5, 1).expand(5, 7),
    "permuted": lambda: tensor(4, 5, 6).permute(2, 0, 1),
    "with an offset, empty": lambda: tensor(4, 5)[2:2, 2:],
    "overlapping": lambda: tensor(12).as_strided((4, 5), (2, 1)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_inputs(name: str) -> None:
    both(lambda x: x * 2 + 1, STRIDED[name]())


NEGATIVE = torch.tensor([-1, 0, 3, -4, 2])
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "flip": (lambda x: x.flip(0) + x.flip(1), (tensor(5, 7),)),
    "roll": (lambda x: x.roll(2, 1), (tensor(4, 9),)),
    "unfold": (lambda x: x.unfold(1, 3, 2) * 2, (tensor(4, 9),)),
    "repeat": (lambda x: x.repeat(2, 3), (tensor(4, 9),)),
    "flatten a transpose": (lambda x: x.t().reshape(-1) * 2, (tensor(4, 9),)),
    "diagonal": (lambda x: x.diagonal() * 2, (tensor(6, 9),)),
    "digits of a position": (lambda x: torch.arange(40).view(5, 8) // 3 + x, (tensor(5, 8),)),
    "cat": (lambda x, y: torch.cat([x, y, x * 2], 1), (tensor(5, 7), tensor(5, 3))),
    "cat of nothing": (lambda x, y: torch.cat([x, y], 0), (tensor(0, 3), tensor(2, 3))),
    "pairs": (lambda x, y: torch.stack([x.exp(), y], -1), (tensor(17, 5), tensor(17, 5))),
    "pairs across": (lambda x, y: torch.stack([x.t(), y], -1), (tensor(33, 17), tensor(17, 33))),
    "pairs of halves": (lambda x: torch.stack([x, x * x], -1), (tensor(3, 50).bfloat16(),)),
    "pairs with a number": (lambda x: torch.stack([x, x * 0 - 0.0], -1), (tensor(7).double(),)),
    "pairs of bytes": (lambda x: torch.stack([x > 0, x < 1], -1), (tensor(3, 9),)),
    "swapped pairs": (lambda x: x.copy_(torch.stack([x[:, 1], x[:, 0] + 1], -1)), (tensor(9, 2),)),
    "pairs of a row": (
        lambda x, y: torch.stack([x + y, y.expand(5, 9)], -1), (tensor(5, 9), tensor(9))
    ),
    "stack": (lambda x, y: torch.stack([x, y, x], 1), (tensor(17, 4).t(), tensor(4, 17))),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 0), value=2.0), (tensor(5, 7),)),
    "crop": (lambda x: F.pad(x, (-1, 2)), (tensor(5, 7),)),
    "reflect": (lambda x: F.pad(x, (2, 1), mode="reflect"), (tensor(2, 5, 7),)),
    "where": (lambda x, y: torch.where(x > 0, x, y), (tensor(5, 7), tensor(7))),
    "masks": (lambda x, y: (x > y) & (y > 0) | x.isnan(), (tensor(4, 9), tensor(4, 9))),
    "triangle": (lambda x: x.tril(1) + x.triu(-1), (tensor(6, 9),)),
    "gather rows, some negative": (lambda x, i: x[i], (tensor(4, 6), NEGATIVE)),
    "gather two axes": (lambda x, i: x[i, :, i], (tensor(4, 6, 5), NEGATIVE)),
    "gather long rows": (lambda x, i: x[i] + 1, (tensor(3, 1000), NEGATIVE % 3)),
    "gather by i32": (lambda x, i: x[i], (tensor(4, 6), NEGATIVE.int())),
    "gather within rows": (lambda x, i: x.gather(1, i), (tensor(5, 6), NEGATIVE[:, None] % 6)),
    "embedding": (lambda x, i: F.embedding(i, x), (tensor(40, 6), torch.arange(21).view(3, 7))),
    "gather into a pad": (lambda x, i: F.pad(x[i], (1, 1)), (tensor(4, 6), NEGATIVE)),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 2, 1), (tensor(2, 3, 9, 11),)),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (tensor(2, 3, 9, 11),)),
    "batch norm of inference": (
        lambda x, w: F.batch_norm(x, w, w.abs() + 1, w, w), (tensor(2, 5, 3, 4), tensor(5))
    ),
    "library functions": (lambda x: (x.sin(), x.double().exp().atan()), (tensor(4, 30) * 9,)),
    "views": (lambda x: (x.view(6, 2, 3).transpose(0, 1), x[1:, ::2], x + 1), (tensor(4, 9),)),
    "a view of what was computed": (lambda x: (x * 2).view(9, 4)[3:], (tensor(4, 9),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, all_kernels: bool) -> None:
    fn, inputs = CASES[name]
    both(fn, *inputs)
    if all_kernels:
        stacks = [b.spills for b in cubins(assert_function(fn, *inputs))]
        assert not any(stacks) or name == "library functions", "of which sin has a table"


@pytest.mark.parametrize("to", DTYPES, ids=str)
def test_casts(to: torch.dtype) -> None:
    """From every type; negative numbers wrap in unsigned ones, which floats may not."""
    xs = [torch.arange(-9, 48).to(torch.int8).to(d) for d in DTYPES if d is not torch.bool]
    xs = [x.abs() if x.is_floating_point() else x for x in xs] + [tensor(57) > 0]
    assert_function(lambda *xs: [x.to(to) for x in xs], *xs)


def test_halves_are_rounded_to_nearest_even_when_they_are_stored() -> None:
    ties = torch.tensor([1.0 + k * 2.0**-9 for k in range(64)]), torch.tensor([1.0 + 2.0**-11] * 64)
    for half in (torch.bfloat16, torch.float16):
        both(lambda x, y: ((x + 0).to(half), (y * 3).to(half)), *ties)


def test_random_numbers_have_the_same_bits() -> None:
    def bits(x: torch.Tensor) -> Any:
        drawn = torch.rand(4, 100)
        dropped = F.dropout(x, 0.3, True)
        normal = torch.randn(4, 10)
        return (drawn * 2**24).to(torch.int32), dropped != 0, normal, torch.randint(0, 9, (50,))

    both(bits, tensor(4, 100) + 10)


DYNAMIC: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "broadcast": lambda x, y: x + y[0],
    "cat": lambda x, y: torch.cat([x, y]),
    "transpose": lambda x, y: x.t() + 1,
    "flatten": lambda x, y: x.t().reshape(-1) * y.reshape(-1),
    "flip": lambda x, y: x.flip(0) + y.flip(1),
    "slice": lambda x, y: x[1:] + y[:-1],
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_one_text_runs_at_several_sizes(name: str) -> None:
    shapes = (tensor(6, 7), tensor(6, 7))
    for tiles in (None, TINY):
        s = assert_function(
            DYNAMIC[name], *shapes, dynamic=True, given=None, seeds=range(4), tiles=tiles
        )
        assert all(k.sizes for k in kernels_of(s)), "the sizes are not symbolic"


def test_wide_rows_of_a_text_have_a_condition_and_full_ones_none() -> None:
    full, ragged = [texts_of(assert_function(lambda x: x + 1, tensor(n)))[0] for n in (2048, 2047)]
    assert " < " not in full, "every lane has an element"
    assert " < 2047" in ragged


def test_a_position_is_a_number_of_64_bits() -> None:
    """Its square is more than 32 bits hold, though the index itself needs less."""
    g = read("""graph @g() on cpu {
      in %x : i64[70000]
      out %y = i64[70000] : map (i: 70000) {
        t0 = where(eq(load(%x, [i]), 5:i64), 5:i64, index(i, i64))
        mul(t0, t0)
      }
      out %z = i64[70000] : map (i: 70000) { shl(index(i, i64), 20:i64) }
      out %b = u32[70000] : map (i: 70000) { rand_bits(load(%x, [0]), index(i, i64), 0) }
    }""")
    s = assert_triton(g)  # type: ignore[arg-type]
    assert "tl.arange(0, 512)\n" in "".join(texts_of(s)), "the indices have 64 bits"
    assert all(b.code for b in cubins(s)), "the bits of a position are 64"


def test_neighbours_are_stored_by_one_access() -> None:
    (text,) = texts_of(
        assert_function(lambda x, y: torch.stack([x, y], -1), tensor(5), tensor(5) * 2)
    )
    assert text.count("tl.store") == text.count("tl.join") == 1


@pytest.mark.parametrize("columns,widths", [(3, [512]), (300, [512]), (3136, [256])])
def test_short_rows_that_are_read_anywhere_share_programs(columns: int, widths: list[int]) -> None:
    g = read(f"""graph @g() on cpu {{
      in %x : f32[900000, 50]
      in %k : i64[900000, {columns}]
      out %y = f32[900000, {columns}] : map (i: 900000, j: {columns}) {{
        load(%x, [i, @0]; @0: 0..49 = assert_in_range(load(%k, [i, j]), 50:i64))
      }}
    }}""")
    (k,) = kernels_of(scheduled(on_gpu(g)))  # type: ignore[arg-type]
    lanes = [s.axis.width for s in walk(k.body) if isinstance(s, For) and s.kind == "lane"]
    assert lanes == widths


def test_arithmetic_of_numbers_that_are_known_wraps() -> None:
    """A row that is written out has known positions, of which Python would compute more bits."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        row = torch.arange(3, dtype=torch.int32)[None] + (2**31 - 2)
        return (row.float() * x[:, None]).sum(1)

    (text,) = texts_of(assert_function(fn, torch.arange(5.0)))
    assert "tl.range" not in text and "tl.reduce" not in text, "the row is written out"


def test_loads_do_not_wait_for_a_division_nor_comparisons_for_its_end() -> None:
    def fn(x: torch.Tensor, t: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hit = torch.arange(x.shape[1]) == t
        return torch.where(hit, a / b, 0.0) - x * 2

    x, t = tensor(5, 300), torch.tensor([[3], [0], [299], [7], [-1]], dtype=torch.int32)
    (text,) = texts_of(assert_function(fn, x, t, tensor(1), tensor(2)[:1]))
    lines = [line for line in text.splitlines() if " = " in line]
    (division,) = [n for n, line in enumerate(lines) if "div_rn" in line]
    assert max(n for n, line in enumerate(lines) if "tl.load" in line) < division
    assert min(n for n, line in enumerate(lines) if " == " in line) > division
