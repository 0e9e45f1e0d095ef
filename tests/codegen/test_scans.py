"""Scans along vectors and beside them, and stores that update, on every target."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
import torch

from lenz.ir.graph import ScanKind
from lenz.ir.kernel import Kernel
from lenz.ir.reader import read
from lenz.ir.verify import verify
from tests.codegen.codegen_run import check

KINDS = get_args(ScanKind)
pytestmark = pytest.mark.usefixtures("target")


def kernel(params: str, body: str, tile: str = "") -> Kernel:
    """A kernel from its text."""
    k = read(f"kernel @k scan ({params}) {tile} {{ {body} }}")
    assert isinstance(k, Kernel)
    verify(k)
    return k


def some(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.rand(n, generator=torch.Generator().manual_seed(n)) * 0.4 + 0.8
    return x.to(dtype) if dtype.is_floating_point else (x * 10).to(dtype)


def rows(
    kind: ScanKind, n: int, dtype: str = "f32", loop: str = "vector", unroll: int = 2
) -> Kernel:
    return kernel(
        f"%x: in {dtype}[{3 * n}], %y: out {dtype}[{3 * n}]",
        f"""for i in 3 : parallel {{ for j in {n} : {loop} {{
              c = scan {kind} {{ load(%x, [{n}*i + j]) }} over j
              store(%y, [{n}*i + j], c) }} }}""",
        f"tile(unroll: {unroll})",
    )


@pytest.mark.diagonal(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", (1, 3, 8, 15, 16, 33, 64, 100))
def test_along_vectors(kind: ScanKind, n: int) -> None:
    check(rows(kind, n, unroll=4), {"x": some(3 * n)}, rtol=1e-5)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unroll", (1, 4))
def test_one_by_one(kind: ScanKind, unroll: int) -> None:
    for n in (1, 7, 8):
        check(rows(kind, n, loop="seq", unroll=unroll), {"x": some(3 * n)}, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "kind"), list(product(("i64", "i32", "u8", "f64"), KINDS[:4])))
def test_types(dtype: str, kind: ScanKind) -> None:
    torch_type = {"i64": torch.int64, "i32": torch.int32, "u8": torch.uint8, "f64": torch.float64}
    check(rows(kind, 37, dtype), {"x": some(111, torch_type[dtype])}, rtol=1e-12)


def test_nan_and_infinity() -> None:
    x = torch.zeros(3, 20)
    x[0, 7], x[1, 3], x[2] = float("nan"), float("inf"), float("-inf")
    for kind in ("max", "min", "sum", "logaddexp"):
        check(rows(kind, 20), {"x": x.reshape(-1)}, rtol=1e-6)  # type: ignore[arg-type]  # from the list


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", (5, 16, 40))
def test_down_columns(kind: ScanKind, width: int) -> None:
    k = kernel(
        f"%x: in f32[{width}*s0], %y: out f32[{width}*s0]; s0: 0..",
        f"""for r in s0 : seq {{ for p in {width} : vector {{
              c = scan {kind} {{ load(%x, [{width}*r + p]) }} over r
              store(%y, [{width}*r + p], c) }} }}""",
    )
    for n in (0, 1, 9):
        check(k, {"x": some(width * n)}, {"s0": n}, rtol=1e-5)


def test_a_scan_of_a_scan_and_their_sum_from_the_end() -> None:
    k = kernel(
        "%x: in f32[s0], %y: out f32[s0], %z: out f32[1]; s0: 1..",
        """for j in s0 : vector {
             c = scan sum { load(%x, [s0 - 1 - j]) } over j
             d = scan max { mul(c, load(%x, [j])) } over j
             store(%y, [s0 - 1 - j], add(c, d))
             t = reduce sum { d } over j
           }
           for i in 1 : seq { store(%z, [i], t) }""",
    )
    for n in (1, 16, 50):
        check(k, {"x": some(n)}, {"s0": n}, rtol=1e-5)


UPDATES = ("add", "mul", "max", "min", "set")


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("mode", UPDATES)
@pytest.mark.parametrize("dtype", ("f32", "bf16", "i64", "i8"))
def test_updates_in_order(mode: str, dtype: str) -> None:
    types = {"f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64, "i8": torch.int8}
    word = "" if mode == "set" else f" {mode}"
    loop = "vector" if mode == "set" else "seq"
    k = kernel(
        f"%v: in {dtype}[s0], %k: in i64[s0], %y: inout {dtype}[6]; s0: 0..",
        f"for r in s0 : {loop} {{ store{word}(%y, [@0], load(%v, [r]);"
        " @0: 0..5 = assert_in_range(load(%k, [r]), 6:i64)) }",
    )
    for n in (0, 1, 7, 35):
        at = torch.randint(0, 6, (n,), generator=torch.Generator().manual_seed(n))
        check(k, {"v": some(n, types[dtype]), "k": at}, {"s0": n}, rtol=1e-5)


@pytest.mark.parametrize("mode", UPDATES)
def test_updates_of_rows_in_lanes(mode: str) -> None:
    word = "" if mode == "set" else f" {mode}"
    k = kernel(
        "%v: in f32[37*s0], %k: in i64[37*s0], %y: inout f32[148]; s0: 0..",
        f"""for b in 2 : parallel {{ for r in s0 : seq {{ for p in min(20, 37 - 20*b) : vector {{
              store{word}(%y, [37*@0 + 20*b + p], load(%v, [37*r + 20*b + p]);
              @0: 0..3 = assert_in_range(load(%k, [37*r + 20*b + p]), 4:i64)) }} }} }}""",
    )
    for n in (0, 1, 9):
        at = torch.randint(0, 4, (37 * n,), generator=torch.Generator().manual_seed(n))
        check(k, {"v": some(37 * n), "k": at}, {"s0": n}, rtol=1e-5)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("dtype", ("i8", "bf16", "bool", "i64"))
@pytest.mark.parametrize("n", (1, 5, 17, 31))
def test_a_known_tail_writes_only_its_own_lanes(dtype: str, n: int) -> None:
    k = kernel(
        f"%v: in {dtype}[{n}], %k: in i64[{n}], %y: inout {dtype}[6]",
        f"for r in {n} : vector {{ store(%y, [@0], load(%v, [r]);"
        " @0: 0..5 = assert_in_range(load(%k, [r]), 6:i64)) }",
    )
    types = {"i8": torch.int8, "bf16": torch.bfloat16, "bool": torch.bool, "i64": torch.int64}
    for at in (0, 5):
        check(k, {"v": some(n).to(types[dtype]), "k": torch.full((n,), at)})


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 8, 16, 17, 24, 32, 40))
def test_rows_behind_each_other(kind: ScanKind, n: int) -> None:
    """Rows begin in the middle of vectors, in a partial last one, and in any copy of the body."""
    for rows, unroll in ((1, 1), (7, 2), (29, 4)):
        k = kernel(
            f"%x: in f32[{rows * n}], %y: out f32[{rows * n}]",
            f"""for f in {rows * n} : vector {{
                  c = scan {kind} {{ load(%x, [f]) }} over f every {n}
                  store(%y, [f], c) }}""",
            f"tile(unroll: {unroll})",
        )
        check(k, {"x": some(rows * n)}, rtol=1e-5)


@pytest.mark.parametrize("dtype", ("i64", "u8", "f64", "bf16"))
@pytest.mark.parametrize("n", (3, 8))
def test_types_of_rows_behind_each_other(dtype: str, n: int) -> None:
    types = {"i64": torch.int64, "u8": torch.uint8, "f64": torch.float64, "bf16": torch.bfloat16}
    load = "load(%x, [f])" if dtype != "bf16" else "cast(load(%x, [f]), f32)"
    value = "c" if dtype != "bf16" else "cast(c, bf16)"
    k = kernel(
        f"%x: in {dtype}[{70 * n}], %y: out {dtype}[{70 * n}]",
        f"""for b in 2 : parallel {{ for f in {35 * n} : vector {{
              c = scan sum {{ {load.replace("[f]", f"[{35 * n}*b + f]")} }} over f every {n}
              store(%y, [{35 * n}*b + f], {value}) }} }}""",
    )
    check(k, {"x": some(70 * n, types[dtype])}, rtol=1e-2 if dtype == "bf16" else 1e-12)


@pytest.mark.parametrize("n", (1, 8, 40))
@pytest.mark.parametrize("loop", ("vector", "seq"))
def test_a_sum_of_minus_zeros_is_one(n: int, loop: str) -> None:
    k = kernel(
        f"%x: in f32[{3 * n}], %y: out f32[{3 * n}]",
        f"""for i in 3 : parallel {{ for j in {n} : {loop} {{
              c = scan sum {{ load(%x, [{n}*i + j]) }} over j
              store(%y, [{n}*i + j], div(1.0:f32, c)) }} }}""",
    )
    x = torch.full((3, n), -0.0)
    x[1, n // 2], x[2, 0] = 0.0, 2.0
    check(k, {"x": x.reshape(-1)})


def test_logarithms_of_sums_in_f64() -> None:
    """Every distance of two numbers, up to those whose exponential is denormal."""
    steps = torch.cat([torch.linspace(-708, 0, 2000), torch.linspace(-3, 3, 2000)]).double()
    x = torch.stack([torch.zeros_like(steps), steps, -torch.ones_like(steps)], -1).reshape(-1)
    k = kernel(
        f"%x: in f64[{x.numel()}], %y: out f64[{x.numel()}]",
        f"""for i in {x.numel() // 3} : parallel {{ for j in 3 : vector {{
              c = scan logaddexp {{ load(%x, [3*i + j]) }} over j
              store(%y, [3*i + j], c) }} }}""",
    )
    check(k, {"x": x}, rtol=4e-15)
