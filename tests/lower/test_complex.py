"""Complex tensors as pairs of real ones: values, memory that is shared, marks of conjugates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree

from lenz.ir.graph import Extern, Graph, Pointwise, Reduction
from lenz.lower.walk import lower
from tests.cuda import CX, cuda_program
from tests.lower.harness import evaluated, lowered

G = torch.Generator().manual_seed(0)
Z, W = (torch.randn(3, 5, dtype=torch.complex64, generator=G) for _ in range(2))
X = torch.randn(3, 5, generator=G)
P = torch.tensor([2, 0])
METADATA = ("lenz.view_as_real", "lenz.view_as_complex", "aten._conj.default")
Fn = Callable[[Tensor, Tensor, Tensor, Tensor], Any]

CASES: dict[str, Fn] = {
    "arithmetic": lambda z, w, x, p: ((z * w + x) / (w - 2), 1j - z, z * 3.0, x * 2j, -z / 2),
    "of 0-d": lambda z, w, x, p: (z * w[0, 0], x + w[0, 0].to(torch.complex128), z / x[0, 0]),
    "types": lambda z, w, x, p: (
        z.to(torch.complex128) * x.double(),
        x.to(torch.complex64),
        torch.add(x, z.double() if z.dtype is torch.float32 else z, alpha=2),
    ),
    "parts": lambda z, w, x, p: ((z * w).real + z.imag, z.conj().imag * 2, (z / w).imag),
    "pairs": lambda z, w, x, p: (
        torch.view_as_real(z * w),
        torch.view_as_complex(x.repeat(1, 2).view(3, 5, 2)) * z,
    ),
    "made": lambda z, w, x, p: (
        torch.complex(x, x + 1),
        torch.polar(x.abs(), x),
        torch.full((2,), 1j),
    ),
    "sizes": lambda z, w, x, p: (
        z.abs(),
        z.angle(),
        z.sgn(),
        (z * 0).sgn(),
        z.norm(),
        z.norm(3, 1),
    ),
    "functions": lambda z, w, x, p: (z.exp(), z.log(), z.log2(), z.log10(), z.sqrt(), z.rsqrt()),
    "circular": lambda z, w, x, p: (z.sin(), z.cos(), z.sinh(), z.cosh()),
    "powers": lambda z, w, x, p: (
        z**2,
        z**-1,
        z**3,
        z**0.5,
        z**-2,
        z**1.7,
        z**w,
        (z * 0) ** 2.5,
        2**z,
    ),
    "comparisons": lambda z, w, x, p: (z == z * 1, z != w, z == 1j, z == x),
    "tests": lambda z, w, x, p: ((z / 0).isnan(), (z / 0).isinf(), (z * 0).any(), z.all()),
    "conjugates": lambda z, w, x, p: (z.conj() * w, (z * w).conj() + 1, z.conj().resolve_conj()),
    "sums": lambda z, w, x, p: (z.sum(), z.sum(1), z.mean(0, True), z.cumsum(1), z.sum((0, 1))),
    "choices": lambda z, w, x, p: (
        torch.where(x > 0, z, x),
        z.masked_fill(x > 0, 2j),
        z.masked_fill(x > 0, 1),
    ),
    "joins": lambda z, w, x, p: (
        torch.cat([z, x, w], 1),
        torch.stack([z, w], -1),
        pad(z, (1, 2), value=3),
    ),
    "moved": lambda z, w, x, p: (
        z.flip(1),
        z.roll(1, 0),
        z.repeat(2, 1),
        z.tril(),
        z[p],
        z.index_select(0, p),
    ),
    "scattered": lambda z, w, x, p: (
        z.index_add(0, p, w[:2]),
        z.slice_scatter(w[:, :2], 1, 1, 3),
        z.index_put((p,), w[:2], accumulate=True),
    ),
    "views": lambda z, w, x, p: (
        (z * w).t().clone(),
        (z + 1).view(5, 3)[1:, ::2] * 2,
        (z * w).unbind(1)[2],
    ),
    "shared": lambda z, w, x, p: (lambda y: (y, y.t(), y[:1].expand(4, 5)))(z * w),
    "of arguments": lambda z, w, x, p: (z.t(), z.conj(), z.t().conj() * 2),
    "empty": lambda z, w, x, p: (z[:0] * w[:0], z[:0].sum(), torch.cat([z[:0], w])),
    "ones": lambda z, w, x, p: (
        torch.ones_like(z) * z,
        torch.eye(3, dtype=z.dtype),
        z.new_zeros(2),
    ),
    "bools": lambda z, w, x, p: (
        torch.zeros_like(z, dtype=torch.bool),
        torch.ones_like(z * 0, dtype=torch.bool),
        torch.full_like(z, 0, dtype=torch.bool),
        z.new_full((2, 3), True, dtype=torch.bool),
        z.bool(),
        (x > 9).copy_(z),
    ),
    "product": lambda z, w, x, p: torch.addcmul(z, w, z, value=2j),
}  # fmt: skip


def calls(g: Graph) -> list[str]:
    """Eager ops of a graph that are more than another look at memory."""
    return [n.op for n in g.nodes if isinstance(n, Extern) and n.op not in METADATA]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dynamic: bool) -> None:
    g, made = evaluated(CASES[name], Z, W, X, P, dynamic=dynamic)
    assert calls(g) == []
    for got, want in zip(made, _pytree.tree_leaves(CASES[name](Z, W, X, P)), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ("arithmetic", "functions", "powers", "sums", "sizes"))
def test_double(name: str) -> None:
    inputs = Z.to(torch.complex128), W.to(torch.complex128), X.double(), P
    g, made = evaluated(CASES[name], *inputs)
    assert calls(g) == []
    for got, want in zip(made, _pytree.tree_leaves(CASES[name](*inputs)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


ENDS = [0.0, -0.0, 1.0, -2.5, 1e30, 1e-30, float("inf"), float("-inf"), float("nan")]
UNARY = ("reciprocal", "abs", "angle", "sgn", "square", "isnan", "isinf")


@functools.cache
def ends() -> tuple[Tensor, Tensor]:
    """All pairs of complex numbers whose parts are zeros, ends, very large or very small."""
    re, im = torch.meshgrid(torch.tensor(ENDS), torch.tensor(ENDS), indexing="ij")
    z = torch.complex(re, im).flatten()
    return z[:, None].expand(81, 81).contiguous(), z.expand(81, 81).contiguous()


@pytest.mark.parametrize("name", ("mul", "eq", "add", "sub", "rsub"))
def test_ends_part_by_part(name: str) -> None:
    """A part is NaN where eager's is."""
    run = getattr(torch, name)
    got, want = evaluated(run, *ends())[1][0], run(*ends())
    pairs = (torch.view_as_real(t) if t.is_complex() else t for t in (got, want))
    torch.testing.assert_close(*pairs, equal_nan=True)


@pytest.mark.parametrize("dim", [-1, 0, None])
def test_a_mean_is_divided_by_a_complex_number(dim: int | None) -> None:
    """Eager's mean of an infinity and 1 is infinity + NaN i."""
    run = lambda z: torch.mean(z, dim)
    z = torch.stack(ends(), -1)
    pairs = (torch.view_as_real(t) for t in (evaluated(run, z)[1][0], run(z)))
    torch.testing.assert_close(*pairs, equal_nan=True)


@pytest.mark.parametrize("name", (*UNARY, "div"))
def test_ends(name: str) -> None:
    """Relative to the size of the number; where eager gives a NaN in a part, one part is NaN."""
    run, inputs = getattr(torch, name), ends() if name == "div" else ends()[1:]
    got, want = evaluated(run, *inputs)[1][0], run(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0, equal_nan=True)


def test_sums_on_gpus_add_parts() -> None:
    """Eager multiplies by a complex 1 on CPUs only, so that 0 + inf i is NaN + inf i there."""
    fn = lambda x, y: (torch.complex(x, y) + torch.complex(y, x)).abs()
    g = lower(cuda_program(fn, (4,), (4,)), CX)
    names = [n.body.op.name for n in g.nodes if isinstance(n, Pointwise)]
    assert names == ["fma", "fma", "hypot"], "a product for the sum"


def test_sums_read_both_parts_at_once_where_they_are_columns() -> None:
    """Not in sums of rows: these would read the memory once per part."""

    def reductions(fn: Callable[[Tensor], Any], z: Tensor) -> int:
        return sum(isinstance(n, Reduction) for n in lowered(fn, [z]).nodes)

    assert [reductions(lambda z, d=d: z.sum(d), Z) for d in (0, 1, (0, 1))] == [1, 2, 1]
    assert reductions(lambda z: z.sum(), Z) == 1
    assert reductions(lambda z: z.t().mean(1), Z) == 1
    assert reductions(lambda z: (z * z).sum(), Z) == 2, "the product is in no memory"
