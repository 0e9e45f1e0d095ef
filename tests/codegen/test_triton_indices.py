"""Index arithmetic as Triton text: random expressions have the value that Python gives them.

Divisions and remainders of negative numbers round down, in 32 and in 64 bits; and indices have 64
bits where 32 do not hold them.
"""

from __future__ import annotations

import random

import pytest
import torch

from lenz.ir.dtype import I64
from lenz.ir.expr import Expr, index, load
from lenz.ir.kernel import For, Kernel, Param, Store, TileConfig
from lenz.ir.reader import read
from lenz.ir.tensor import axis, lane_axis
from lenz.machine.cuda.triton.compile import compile_text
from lenz.machine.cuda.triton.kernel import emit
from lenz.sym import Int, Sym, Var, show, substitute
from tests.gpu_oracle import interpreted, kernels_of, on_gpu, scheduled
from tests.sym.test_sym_properties import VARS, Tree, build, random_tree, value, values

pytest.importorskip("triton")

LANES = 16
BATCH = 25
BATCHES = 10  # of either width: 500 expressions
# What `values` draws for variables without bounds, and for those below others.
BOUNDS = {v: (-40 if v.lo is None else v.lo, 2400 if v.hi is None else v.hi) for v in VARS}


def trees(batch: int, bounded: bool) -> list[tuple[Tree, Expr]]:
    """Expressions over variables that are loaded: row k of %x is VARS[k]."""
    rng = random.Random(f"{batch} {bounded}")
    found: list[tuple[Tree, Expr]] = []
    lane = Var("v", 0, LANES - 1)
    while len(found) < BATCH:
        t = random_tree(rng, rng.randint(1, 4))
        try:
            s = build(t)
        except ZeroDivisionError:
            continue
        free = s.free_vars
        at: dict[Var, Sym] = {}
        for k, v in enumerate(free):
            lo, hi = BOUNDS[v] if bounded else (v.lo, v.hi)
            at[v] = Var(f"@{k}", lo, hi)
        rows = tuple(load("x", (LANES * VARS.index(v) + lane,), I64) for v in free)
        s = substitute(s, at)
        found.append((t, index(s, I64, rows)))
    return found


def kernel(exprs: list[Expr]) -> Kernel:
    """One store per expression; a lane is an assignment to the variables."""
    v = lane_axis(axis("v", Int(LANES)))
    stores = tuple(Store("y", LANES * k + v.var, e) for k, e in enumerate(exprs))
    params = (
        Param("x", I64, Int(LANES * len(VARS)), "in"),
        Param("y", I64, Int(LANES * len(exprs)), "out"),
    )
    body = (For(v, "lane", stores),)
    return Kernel("indices", "pointwise", params, (), body, tile=TileConfig(warps=1))


@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_expressions(batch: int, bounded: bool) -> None:
    found = trees(batch, bounded)
    rng = random.Random(batch)
    points = [values(rng) for _ in range(LANES)]
    x = torch.tensor([[p[v] for p in points] for v in VARS])
    compared = negative = 0
    # One kernel for those that 32 bits hold, if any, and one for the others.
    for narrow in (True, False):
        group = [(t, e) for t, e in found if is_narrow(e) == narrow]
        if not group:
            continue
        y = torch.full((len(group), LANES), 1 << 40)
        k = kernel([e for _, e in group])
        assert ("tl.arange(0, 16).to(tl.int64)" in emit(k).text) != narrow
        interpreted(k, {"x": x.reshape(-1).clone(), "y": y.view(-1)}, {})
        for (t, e), row in zip(group, y.tolist(), strict=True):
            for at, got in zip(points, row, strict=True):
                try:
                    want = value(t, at)
                except ZeroDivisionError:
                    continue
                assert got == want, f"{show(e.attrs[0])} of {e.args} at {at}"
                compared += 1
                negative += want < 0
    assert compared > BATCH * LANES // 2 and negative > 10, "the sample says little"


def test_divisions_that_round_down_have_room() -> None:
    """A remainder and its divisor are added up on the way: 32 bits must hold the sum."""
    n, d = Var("@0", -5, 1_900_000_000), Var("@1", 1, 2_000_000_000)
    rows = tuple(load("x", (LANES * k + Var("v", 0, LANES - 1),), I64) for k in (0, 1))
    points = [(m, k) for m in (-5, 0, 7, 1_900_000_000) for k in (1, 3, 1_950_000_000, 2 * 10**9)]
    x, y = torch.zeros(len(VARS), LANES, dtype=torch.int64), torch.zeros(2, LANES).long()
    x[:2] = torch.tensor(points).t()
    k = kernel([index(n // d, I64, rows), index(n % d, I64, rows)])
    interpreted(k, {"x": x.view(-1), "y": y.view(-1)}, {})
    assert y.t().tolist() == [[m // k, m % k] for m, k in points]


def is_narrow(e: Expr) -> bool:
    """True when the kernel of this expression alone computes in 32 bits."""
    return ".to(tl.int64)" not in emit(kernel([e])).text.split("tl.arange")[1].split("\n")[0]


def test_both_widths_are_sampled() -> None:
    widths = [is_narrow(e) for batch in range(BATCHES) for _, e in trees(batch, True)]
    assert sum(widths) > 100, "32 bits are hardly ever enough"
    widths = [is_narrow(e) for batch in range(BATCHES) for _, e in trees(batch, False)]
    assert len(widths) - sum(widths) > 100, "64 bits are hardly ever needed"


def graph(text: str) -> Kernel:
    """The first kernel of a graph on a GPU; a long row is reduced in parts by two."""
    k, *_ = kernels_of(scheduled(on_gpu(read(text))))  # type: ignore[arg-type]
    return k


HUGE = {
    "one element too many": """graph @g() on cpu {
      in %x : i8[2147483649]
      out %y = i8[2147483649] : map (i: 2147483649) { neg(load(%x, [i])) }
    }""",
    "only the result": """graph @g() on cpu {
      in %x : i8[65536]
      out %y = i8[65536, 65536] : map (i: 65536, j: 65536) { add(load(%x, [i]), load(%x, [j])) }
    }""",
    "strides": """graph @g() on cpu {
      in %x : i8[3, 2 : 1, 3000000000]
      out %y = i8[3, 2] : map (i: 3, j: 2) { neg(load(%x, [i, j])) }
    }""",
    "an offset": """graph @g() on cpu {
      in %x : i8[3 : 1 @ 3000000000]
      out %y = i8[3] : map (i: 3) { neg(load(%x, [i])) }
    }""",
    "a row": """graph @g() on cpu {
      in %x : f32[2, 2147483648]
      out %y = i64[2] : reduce argmax (i: 2 | r: 2147483648) { load(%x, [i, r]) }
    }""",
    "rows of a table": """graph @g() on cpu {
      in %x : i8[100000, 65536]
      in %i : i64[7]
      out %y = i8[7] : map (i: 7) { load(%x, [@0, 3]; @0: 0..99999 = load(%i, [i])) }
    }""",
    "a size without bounds": """graph @g(s0: 1..) on cpu {
      in %x : i8[s0]
      out %y = i8[s0] : map (i: s0) { neg(load(%x, [i])) }
    }""",
}


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("name", HUGE)
def test_indices_have_64_bits_where_32_are_not_enough(name: str) -> None:
    made = emit(graph(HUGE[name]))
    assert "tl.int64" in made.text and not {"i32"} & set(made.signature)
    assert "tl.int32" not in made.text, "an index is cut to 32 bits"
    assert compile_text(made, 90).code[:4] == b"\x7fELF"


def test_the_last_element_that_32_bits_reach() -> None:
    made = emit(
        graph("""graph @g(s0: 1..512) on cpu {
          in %x : i8[s0, 4194303]
          in %i : i64[s0]
          out %y = i8[s0] : map (i: s0) { load(%x, [i, @0]; @0: 0..4194302 = load(%i, [i])) }
        }""")
    )
    assert "tl.int64" not in made.text.replace(".to(tl.int32)", "")
    assert made.signature[-1] == "i32", "a size is an index"
