"""Every op of the table with every type it takes, and inputs to try it on.

The tests of the code generators run compiled code on the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import lenz.ops  # noqa: F401 - fills the op table
from lenz.ir.dtype import BF16, BOOL, F16, F32, F64, I32, I64, MOVED, NATIVE, DType
from lenz.ir.op import Op, all_ops

INF, NAN = float("inf"), float("nan")
SPECIALS = (
    0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-45, -1e-45, 1e-40,
    -1e-40, 2.0**-126, 3.4028235e38, -3.4028235e38, 16777217.0, 2147483648.0, -2147483904.0, 1e19,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One op with operand types and attributes; `samples` gives one tensor per operand."""

    op: Op
    dtypes: tuple[DType, ...]
    attrs: tuple[Any, ...] = ()

    def __str__(self) -> str:
        attrs = [str(a) for a in self.attrs]
        return "-".join([self.op.name, *[d.name for d in self.dtypes], *attrs])

    def samples(self, count: int = 2000) -> tuple[torch.Tensor, ...]:
        """Tensors of one length: random values of the op's domain, then pairs of special ones."""
        g = torch.Generator().manual_seed(1234)
        special = [_specials(self, k) for k in range(len(self.dtypes))]
        places = torch.meshgrid(*[torch.arange(len(s)) for s in special], indexing="ij")
        pick = torch.randperm(places[0].numel(), generator=g)[:4000]
        return tuple(
            torch.cat([_random(self, k, count, g), special[k][places[k].flatten()[pick]]])
            for k in range(len(self.dtypes))
        )


def _domain(op: Op, k: int) -> tuple[float, float]:
    low, high = op.domain[k] if isinstance(op.domain[0], tuple) else op.domain
    return float(low), float(high)


def _limits(d: DType) -> tuple[int, int]:
    return (0, 2**d.bits - 1) if d.kind == "uint" else (-(2 ** (d.bits - 1)), 2 ** (d.bits - 1) - 1)


def _is_exponent(case: Case, k: int) -> bool:
    return case.op.name == "scale" and k == 1  # an integer, whatever its type


def _small_range(case: Case, k: int) -> tuple[int, int] | None:
    """The operands whose range the op limits."""
    name, d = case.op.name, case.dtypes[k]
    if name in ("shl", "shr") and k == 1:
        return 0, d.bits - 1
    if name == "scale" and k == 1:
        return -100, 100
    if name == "pow" and k == 1:
        return (-3 if d.kind == "int" else 0), 70
    return None


def _specials(case: Case, k: int) -> torch.Tensor:
    d = case.dtypes[k]
    if d is BOOL:
        return torch.tensor([False, True])
    if d.is_float and not _is_exponent(case, k):
        small = case.op.name == "scale"  # its contract excludes results that round twice
        return torch.tensor(SPECIALS[:14] if small else SPECIALS, dtype=d.torch)
    limits = _small_range(case, k)
    low, high = (0, 0) if d.is_float else _limits(d)
    values = [0, 1, 2, 3, 7, low, low + 1, high, high - 1] + ([-1, -2, -7] if low < 0 else [])
    if limits is not None:
        values = list(range(limits[0], limits[1] + 1, 3))
    return torch.tensor(values, dtype=d.torch)


def _random(case: Case, k: int, count: int, g: torch.Generator) -> torch.Tensor:
    d = case.dtypes[k]
    if d is BOOL:
        return torch.rand(count, generator=g) < 0.5
    if d.is_float and not _is_exponent(case, k):
        return _random_float(case, k, count, g)
    limits = _small_range(case, k)
    if limits is not None:
        return torch.randint(limits[0], limits[1] + 1, (count,), generator=g).to(d.torch)
    wide = torch.randint(-(2**63), 2**63 - 1, (count,), generator=g)
    near = torch.randint(-20, 20, (count,), generator=g)
    return torch.where(torch.rand(count, generator=g) < 0.5, wide, near).to(d.torch)


def _random_float(case: Case, k: int, count: int, g: torch.Generator) -> torch.Tensor:
    low, high = _domain(case.op, k)
    even = torch.rand(count, generator=g, dtype=torch.float64) * (high - low) + low
    # As many of every size down to the least normal f32 as of the greatest.
    size = 10.0 ** (torch.rand(count, generator=g, dtype=torch.float64) * 39 - 38)
    scaled = size * max(abs(low), abs(high)) * torch.sign(even)
    inside = (scaled >= low) & (scaled <= high) & (torch.rand(count, generator=g) < 0.5)
    return torch.where(inside, scaled, even).to(case.dtypes[k].torch)


def _signatures(op: Op) -> Iterator[tuple[tuple[DType, ...], tuple[Any, ...]]]:
    match op.name:
        case "where":
            yield from (((BOOL, d, d), ()) for d in MOVED)
        case "cast" | "bitcast":
            yield from (((a,), (b,)) for a in MOVED for b in MOVED)
        case "narrow":
            yield from (((F32,), (d,)) for d in (F16, BF16))
        case "scale":
            yield from (((F32, I32), ()), ((F32, F32), ()), ((F64, I64), ()))
        case "or_libm":
            yield from (((BOOL, d, d), (f,)) for d in (F32, F64) for f in ("sin", "cos", "tan"))
        case "rand_bits":
            yield from (((I64, I64), (word,)) for word in range(4))
        case "shared_bits":
            yield ((I64,) * 3, ())
        case _:
            yield from (((d,) * op.arity, ()) for d in NATIVE)


def cases() -> tuple[Case, ...]:
    """Every op with an eager form and every signature its type rule accepts."""
    found: list[Case] = []
    for op in all_ops():
        if op.eager is None or op.arity < 1 or op.guarded:
            continue
        for dtypes, attrs in _signatures(op):
            try:
                op.dtype(dtypes, attrs)
            except TypeError:
                continue
            found.append(Case(op, dtypes, attrs))
    return tuple(found)


CASES = cases()
