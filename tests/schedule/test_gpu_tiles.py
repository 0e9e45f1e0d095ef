"""How wide tiles of GPU kernels are, where measurements on a card decided it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.ir.reader import read
from lenz.machine.cuda.triton.kernel import emit
from tests.gpu_oracle import assert_function, kernels_of, on_gpu, scheduled
from tests.lower.harness import lowered

BF16 = torch.bfloat16


def texts(fn: Any, *args: Tensor, dynamic: bool = False) -> list[tuple[str, int]]:
    g = on_gpu(lowered(fn, list(args), dynamic=dynamic))
    found = [emit(k, 90) for k in kernels_of(scheduled(g))]
    return [(t.text, t.warps) for t in found]


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x, 1)


def test_tiles_of_columns_end_with_the_rows() -> None:
    ((text, _),) = texts(lambda x: x.sum(1), torch.empty(2048, 784, 256))
    assert "tl.arange(0, 16)" in text and "<" not in text


def test_columns_that_are_only_reduced_are_read_again() -> None:
    ((text, warps),) = texts(statistics, torch.empty(1024, 224, 256, dtype=BF16))
    assert text.count("for r0b") == 2 and warps == 4


def test_columns_that_are_stored_are_held_by_8_warps() -> None:
    ((text, warps),) = texts(lambda x: x.softmax(1), torch.empty(256, 256, 1024, dtype=BF16))
    assert "for " not in text and warps == 8


@pytest.mark.parametrize(("dtype", "rows", "warps"), [(BF16, 8, 2), (torch.float32, 32, 4)])
def test_many_columns_of_halves_have_short_tiles(dtype: torch.dtype, rows: int, warps: int) -> None:
    ((text, found),) = texts(lambda x: x.sum(1), torch.empty(128, 512, 2048, dtype=dtype))
    assert f"r0 = tl.arange(0, {rows})" in text and found == warps


@pytest.mark.parametrize(
    ("shape", "widths"),
    [((4, 3, 1 << 20), [256, 4]), ((65536, 4, 32), [8, 32, 4]), ((1024, 12, 1024), [64, 16])],
)
def test_threads_have_short_columns_of_their_own(shape: tuple[int, ...], widths: list[int]) -> None:
    """A panel of 64 was a tiny program of 4 warps: these took 3 to 9 times as long on an H200."""
    ((text, warps),) = texts(lambda x: x.softmax(1), torch.empty(shape, dtype=BF16))
    assert [int(n) for n in re.findall(r"tl.arange\(0, (\d+)\)", text)] == widths and warps == 1


@pytest.mark.parametrize(
    ("fn", "shape", "widths"),
    [
        (lambda x: x.var(1), (512, 100, 1000), [16, 128]),  # two sums
        (lambda x: x - x.amax(1, keepdim=True), (512, 64, 1000), [32, 64]),
        (lambda x: x.sum(1), (65536, 32, 8), [8, 8, 8]),  # columns of two axes
        (lambda x: x.cumsum(1), (65536, 8, 8), [16, 8, 8]),
        (lambda x: x.cummax(1)[0], (512, 32, 1000), [32, 32]),
    ],
)
def test_one_warp_has_columns_of_all_axes(fn: Any, shape: Any, widths: list[int]) -> None:
    ((text, warps),) = texts(fn, torch.empty(shape, dtype=BF16))
    assert [int(n) for n in re.findall(r"tl.arange\(0, (\d+)\)", text)] == widths and warps == 1


def test_columns_of_one_sum_that_are_stored_have_more_warps() -> None:
    fn = lambda x: x - x.amax(1, keepdim=True)
    ((_, warps),) = texts(fn, torch.empty(512, 100, 1000, dtype=BF16))
    assert warps == 8


@pytest.mark.parametrize(
    ("shape", "widths"),
    [((1 << 20, 8), [128, 8]), ((512, 512, 5), [128, 8]), ((1024, 32, 32), [32, 32])],
)
def test_tiles_of_transpositions_have_1024_elements(shape: Any, widths: list[int]) -> None:
    ((text, _),) = texts(lambda x: x.movedim(-1, -2).contiguous(), torch.empty(shape, dtype=BF16))
    assert sorted(int(n) for n in re.findall(r"tl.arange\(0, (\d+)\)", text)) == sorted(widths)


def test_small_matrices_are_transposed_together() -> None:
    """A tile of one matrix of 16 x 4 would have 64 elements."""
    x = torch.empty(131072, 16, 4, dtype=BF16)
    ((text, _),) = texts(lambda x: x.mT.contiguous(), x)
    assert sorted(int(n) for n in re.findall(r"tl.arange\(0, (\d+)\)", text)) == [4, 16, 16]


@pytest.mark.parametrize("form", [lambda x: x, lambda x: x.flip(2), lambda x: x[:, :, ::2]])
def test_columns_are_side_by_side_in_either_direction_and_in_steps(form: Any) -> None:
    """As rows, each program read every 64th number: 630 us instead of 28 on an H200."""

    def normed(x: Tensor) -> Tensor:
        x = form(x).permute(2, 1, 0)
        return x / (x.norm(dim=1, keepdim=True) + 1)

    x = torch.empty(1337, 256, 64, dtype=BF16)
    (k,) = kernels_of(scheduled(on_gpu(lowered(normed, [x]))))
    assert k.kind == "outer_reduction"


@pytest.mark.parametrize(
    ("rows", "kinds"), [(4096, ["reduction", "transpose"]), (64, ["reduction"])]
)
def test_rows_whose_result_is_transposed_are_a_kernel_of_their_own(
    rows: int, kinds: list[str]
) -> None:
    """One kernel would store one element per line of the cache: 260 us instead of 35 on an H200."""

    def turned(x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:]).mT.contiguous()

    g = on_gpu(lowered(turned, [torch.empty(rows, 1024, dtype=BF16)]))
    assert [k.kind for k in kernels_of(scheduled(g))] == kinds


def test_several_sums_have_shorter_tiles() -> None:
    def sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.sum(1), y.sum(1), (x * y).sum(1)

    x = torch.empty(1024, 512, 256)
    ((one, _),) = texts(lambda x: x.sum(1), x)
    ((text, warps),) = texts(sums, x, x)
    assert "r0 = tl.arange(0, 32)" in one
    assert "r0 = tl.arange(0, 8)" in text and warps == 4


@pytest.mark.slow
@pytest.mark.parametrize(("size", "pieces", "branches"), [(1536, 2, 1), (768, 3, 2), (700, 2, 0)])
def test_programs_compute_the_piece_of_a_row_in_which_they_lie(
    size: int, pieces: int, branches: int
) -> None:
    def joined(x: Tensor) -> Tensor:
        return torch.cat([(x * (k + 1)).sigmoid() for k in range(pieces)], -1)

    ((text, _),) = texts(joined, torch.empty(1024, size, dtype=BF16))
    assert text.count("if p1b") == branches and text.count("tl.exp2") == pieces
    assert_function(joined, torch.randn((1 << 19) // (size * pieces) + 4, size))


@pytest.mark.slow
def test_no_branch_is_left_that_never_runs() -> None:
    """Both tests of a gate of joined parts say the same. Sizes of 1 have no lanes."""

    def gated(x: Tensor) -> Tensor:
        return torch.nn.functional.glu(torch.cat([x, x], -1), -1)

    for shape in ((2, 1, 2), (1, 1), (3, 0), (600, 1024)):
        x = torch.randn(shape)
        assert_function(lambda x: torch.nn.functional.glu(torch.cat([x, x], 0), 0), x)
        assert_function(gated, x)


@pytest.mark.parametrize(("size", "kernels"), [(4864, 1), (4870, 2)])
def test_a_long_formula_is_stored_if_programs_lie_in_two_pieces(size: int, kernels: int) -> None:
    def gradients(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
        s = x.sigmoid()
        return torch.cat([g * y * s * (1 + x * (1 - s)), g * x * s], -1)

    assert len(texts(gradients, *[torch.empty(8192, size, dtype=BF16)] * 3)) == kernels


def test_parts_of_few_columns_are_added_in_one_turn() -> None:
    ((text, _),) = texts(lambda x: x.sum(0), torch.empty(300, 768))
    assert "tl.arange(0, 512)" in text and "for " not in text


@pytest.mark.parametrize(("heads", "axes"), [(4, 4), (32, 3)])
def test_short_axes_share_a_tile(heads: int, axes: int) -> None:
    def stacked(q: Tensor, k: Tensor) -> Tensor:
        return torch.stack([q.transpose(1, 2), k.permute(0, 3, 1, 2)], 2)

    q, k = torch.empty(512, heads, 16, 6), torch.empty(512, heads, 6, 16)
    ((text, _),) = texts(stacked, q, k)
    assert text.count("tl.arange(") == axes


def test_parts_of_a_sum_lie_in_memory() -> None:
    """Whatever the order of the dimensions is."""
    (part, _), _ = texts(lambda x: x.permute(2, 0, 1).mean(), torch.empty(512, 512, 64))
    assert "tl.load(a0 + ((16384 * p0) + r0))" in part
    (part, _), _ = texts(
        lambda x: x.permute(0, 3, 1, 2).sum((1, 2, 3)), torch.empty(8, 64, 64, 256)
    )
    assert re.search(r"tl\.load\(a0 \+ \(\(.*\) \+ r0\)\)", part)


def test_few_programs_have_8_warps() -> None:
    ((_, warps),) = texts(lambda x: x.sum(1), torch.empty(64, 1024, 512, dtype=BF16))
    assert warps == 8


def test_all_lanes_are_reduced_in_one_dimension() -> None:
    ((text, _),) = texts(lambda x: x.sum((1, 2)), torch.empty(64, 8, 4096))
    assert text.count("tl.reduce(") == 1


@pytest.mark.slow
def test_a_value_per_row_of_a_tile_is_loaded_as_a_vector() -> None:
    ((text, _),) = texts(lambda x, w: x * w[:, None], torch.empty(64, 32), torch.empty(64))
    assert "tl.load(tl.reshape(a1 + ((8 * p0b) + p0), [8]))[:, None]" in text


@pytest.mark.parametrize(("size", "tile"), [(8192, 256), (180224, 512), (1 << 20, 1024)])
def test_few_elements_have_small_tiles_and_8_warps(size: int, tile: int) -> None:
    ((text, warps),) = texts(lambda x: x.sin() * x, torch.empty(size, dtype=BF16))
    assert f"tl.arange(0, {tile})" in text and warps == (4 if tile == 1024 else 8)


@pytest.mark.parametrize(("rows", "each"), [(512, 4), (1 << 16, 16)])
def test_few_short_rows_are_spread_over_programs(rows: int, each: int) -> None:
    ((text, warps),) = texts(lambda x: x.softmax(1), torch.empty(rows, 64))
    assert f"tl.arange(0, {each})[:, None]" in text and warps == 1


@pytest.mark.parametrize(("edge", "tile"), [(256, 32), (2048, 64)])
def test_a_small_matrix_is_transposed_in_small_tiles(edge: int, tile: int) -> None:
    ((text, _),) = texts(lambda x: (x.t() + 1).contiguous(), torch.empty(edge, edge))
    assert f"tl.arange(0, {tile})[:, None]" in text


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * x.square().mean(1, keepdim=True) * w


@pytest.mark.parametrize(("rows", "early"), [(8, True), (1 << 16, False)])
def test_later_loads_are_in_flight_while_threads_wait(rows: int, early: bool) -> None:
    """Unless they fill registers: 32 elements per thread do, where rows are many."""
    ((text, _),) = texts(scaled, torch.empty(rows, 1024), torch.empty(1024))
    assert (text.index("tl.load(a1") < text.index("tl.reduce")) is early


def test_updates_along_the_last_dimension_read_whole_lines() -> None:
    """The other dimension has no contiguous access to any operand."""
    x, i = torch.empty(2048, 2048), torch.zeros(2048, 2048, dtype=torch.int64)
    _, (across, _) = texts(lambda x, i: x.scatter_add(0, i, x), x, i)
    _, (along, _) = texts(lambda x, i: x.scatter_add(1, i, x), x, i)
    assert re.findall(r"tl\.load\(.*\b(\w+)\)\)", across) == ["p0", "p0"]
    assert re.findall(r"tl\.load\(.*\b(\w+)\)\)", along) == ["r0", "r0"]


@pytest.mark.parametrize("length", [3, 64, 300])
def test_updates_along_short_rows_have_lanes_in_a_row(length: int) -> None:
    """Triton lets the threads of tiles run down their columns, whose elements are far apart."""
    x, i = torch.empty(5000, length), torch.zeros(5000, length, dtype=torch.int64)
    _, (text, warps) = texts(lambda x, i: x.scatter_add(1, i, x), x, i)
    assert re.findall(r"tl\.arange\(0, (\d+)\)", text) == ["512"] and warps == 4
    _, (text, _) = texts(lambda x, i: x.index_add(0, i, x), x, i[:, 0])
    assert text.count("tl.arange") == 2  # all lanes of a row have one place


def test_short_rows_of_pairs_have_lanes_in_a_line() -> None:
    """Otherwise Triton lets threads run down the columns of a tile: no access is contiguous."""

    def rotated(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)

    x, c = torch.empty(4, 2048, 32, 128, dtype=BF16), torch.empty(2048, 1, 64, dtype=BF16)
    ((text, _),) = texts(rotated, x, c, c)
    assert re.findall(r"tl\.arange\(0, (\d+)\)", text) == ["512", "2"]
    ((text, _),) = texts(lambda x: x[..., :64] * 2, x)
    assert text.count("tl.arange") == 2  # each row is contiguous
    ((text, _),) = texts(lambda x: x.flip(1) * 2, torch.empty(65536, 100))
    assert text.count("tl.arange") == 1
    ((text, _),) = texts(lambda x: x.flip(1) * 2, torch.empty(65536, 100), dynamic=True)
    assert text.count("tl.arange") == 2  # lines would divide by the length


def test_updates_of_rows_visit_a_part_of_all_of_them_first() -> None:
    g, at = torch.empty(65536, 4096), torch.zeros(65536, dtype=torch.int64)
    _, (text, _) = texts(lambda g, i: g.new_zeros(8192, 4096).index_add(0, i, g), g, at)
    assert "r0 = pid1 % 65536" in text
    _, (text, _) = texts(lambda g, i: g.new_zeros(100, 4096).index_add(0, i, g), g, at)
    assert "r0 = pid1 // 8" in text  # the table is small


def test_lines_do_not_divide_by_a_length_that_is_not_known() -> None:
    """The bounds of quotients by it are lost, so that indices would have 64 bits."""
    x, i = torch.empty(5000, 100), torch.zeros(5000, 100, dtype=torch.int64)
    for fn in (lambda x, i: x.scatter_add(1, i, x), lambda x, i: x.gather(1, i)):
        *_, (text, _) = texts(fn, x, i, dynamic=True)
        assert text.count("tl.arange") == 2
    rows = read("""graph @g(n: 1..20000) on cpu {
      in %x : f32[n, 100]
      in %i : i64[n, 100]
      out %y = f32[n, 100] : map (i: n, j: 100) {
        load(%x, [i, @0]; @0: 0..99 = assert_in_range(load(%i, [i, j]), 100:i64))
      }
    }""")
    (k,) = kernels_of(scheduled(on_gpu(rows)))  # type: ignore[arg-type]
    text = emit(k, 90).text
    assert text.count("tl.arange") == 1 and "// 100" in text and "to(tl.int64)" not in text


def test_rows_that_lanes_read_anywhere_are_tiles_of_their_own() -> None:
    x, i = torch.empty(16, 64, 3136), torch.zeros(16, 1, 3136, dtype=torch.int64)
    ((text, warps),) = texts(lambda x, i: x.gather(2, i.expand_as(x)), x, i)
    assert text.count("tl.arange") == 1 and "tl.arange(0, 256)" in text and warps == 4
    table, at = torch.empty(1000, 192), torch.zeros(8192, dtype=torch.int64)
    ((text, _),) = texts(lambda x, i: x[i].exp(), table, at)
    assert text.count("tl.arange") == 2  # lanes read a row of the table in order


def test_rows_that_are_gathered_again_are_read_part_by_part() -> None:
    """A part of all rows of the table stays in the cache."""
    table, at = torch.empty(64, 1 << 16), torch.zeros(4096, dtype=torch.int64)
    ((text, _),) = texts(lambda x, i: x[i].exp(), table, at)
    assert "p0 = pid1 % 4096" in text
    ((text, _),) = texts(lambda x, i: x[i].exp(), table, at[:64])
    assert "p0 = pid1 // 64" in text  # row by row


def test_a_row_of_odd_length_tests_its_last_tile_alone() -> None:
    ((text, _),) = texts(torch.relu, torch.empty(2049, 2047, dtype=BF16))
    whole, last = text.split("else:")
    assert "if " in whole and re.findall(r"tl\.(?:load|store)\(.*\)", whole)
    assert not re.search(r"tl\.load\(.*, t\d+\)", whole) and re.search(
        r"tl\.load\(.*, t\d+\)", last
    )
    ((text, _),) = texts(torch.relu, torch.empty(2048, 2047, dtype=BF16))
    assert "if " not in text  # a whole number of tiles


@pytest.mark.parametrize(("reduced", "rows"), [(torch.sum, 64), (torch.argmax, 8)])
def test_one_warp_adds_up_few_rows(reduced: Any, rows: int) -> None:
    ((text, warps),) = texts(lambda x: reduced(x, 0), torch.empty(rows, 1 << 16))
    assert warps == 1 and "r0 = tl.arange(0, 8)" in text
    (_, warps), *_ = texts(lambda x: reduced(x, 0), torch.empty(512, 1 << 16))
    assert warps > 1


@pytest.mark.parametrize(("stride", "kind"), [(1, "pointwise"), (7, "reduction")])
def test_windows_that_overlap_are_written_out(stride: int, kind: str) -> None:
    x = torch.randn(2, 3, 14, 14)
    s = assert_function(lambda x: torch.nn.functional.avg_pool2d(x, 7, stride), x)
    assert [k.kind for k in kernels_of(s)] == [kind]
