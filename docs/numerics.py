"""Write the table of docs/numerics.md: the largest error of every function, measured on the CPU.

    python docs/numerics.py

Each function is compiled and compared with a more accurate one: bf16 and fp16 at all their values,
f32 at a million values with torch's f64, f64 at a thousand with mpmath. It takes about a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import mpmath  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import lenz.ops  # noqa: E402, F401 - fills the op table
from lenz.ir.op import Op, all_ops  # noqa: E402

START, END = "<!-- measured by `python docs/numerics.py` -->\n", "<!-- end -->\n"
# bits of the significand, exponent of the least normal number
FORMS = {
    torch.bfloat16: (8, -126), torch.float16: (11, -14),
    torch.float32: (24, -126), torch.float64: (53, -1022),
}  # fmt: skip
MP: dict[str, Callable[..., Any]] = {
    "exp2": lambda x: mpmath.power(2, x), "log2": lambda x: mpmath.log(x, 2),
    "rsqrt": lambda x: 1 / mpmath.sqrt(x), "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "lgamma": mpmath.loggamma, "pow": mpmath.power,
}  # fmt: skip


def functions() -> tuple[Op, ...]:
    """The ops with an error that a torch function has the name of."""
    return tuple(
        op for op in all_ops()
        if op.ulp and hasattr(torch, op.name) and (op.aten or op.name in ("pow", "rsqrt"))
    )  # fmt: skip


def ulps(got: Tensor, true: Tensor, dtype: torch.dtype) -> Tensor:
    """|got - true| in units in the last place of `true`; 0 where both are the same non-number."""
    digits, least = FORMS[dtype]
    exponent = torch.frexp(true).exponent.clamp(min=least + 1)
    found = (got.double() - true).abs() / torch.ldexp(torch.ones_like(true), exponent - digits)
    beyond = true.to(dtype)  # an overflow, and what is no number, has to be just that
    same = (got == beyond) | (got.isnan() & true.isnan())
    return torch.where(same & ~true.isfinite() | (got == beyond) & beyond.isinf(), 0.0, found)


def sample(op: Op, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Operands in the domain of an op: all values of a half type for one operand, else `count`."""
    g = torch.Generator().manual_seed(0)
    found = []
    for k in range(op.arity):
        low, high = op.domain[k] if isinstance(op.domain[0], tuple) else op.domain
        if dtype.itemsize == 2 and op.arity == 1:
            x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
            return [x[(x >= low) & (x <= high)]]
        even = torch.rand(count, generator=g, dtype=torch.float64) * (high - low) + low
        small = even * 10.0 ** (torch.rand(count, generator=g, dtype=torch.float64) * -37)
        inside = (torch.rand(count, generator=g) < 0.5) & (small >= low)
        found.append(torch.where(inside, small, even).to(dtype))
    return found


def measured(dtype: torch.dtype, count: int) -> Iterator[tuple[Op, float, float]]:
    """(op, lenz's greatest error, eager's) for each function, in ulp of the type."""
    ops = [op for op in functions() if dtype is not torch.float64 or _exact(op)]
    inputs = [sample(op, dtype, count) for op in ops]

    def every(inputs: list[list[Tensor]]) -> list[Tensor]:
        return [getattr(torch, op.name)(*xs) for op, xs in zip(ops, inputs, strict=True)]

    got = torch.compile(every, backend="lenz", dynamic=False)(inputs)
    for op, xs, ours, theirs in zip(ops, inputs, got, every(inputs), strict=True):
        if dtype is torch.float64:
            true, rest = _precise(op, xs)
            errors = [_far(y, true, rest) for y in (ours, theirs)]
        else:
            exact = getattr(torch, op.name)(*[x.double() for x in xs])
            errors = [ulps(y, exact, dtype) for y in (ours, theirs)]
        yield op, float(errors[0].max()), float(errors[1].max())


def _exact(op: Op) -> Callable[..., Any] | None:
    return MP.get(op.name) or getattr(mpmath, op.name, None)


def _precise(op: Op, xs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The true values as sums of two f64."""
    of = _exact(op)
    assert of is not None
    with mpmath.workprec(160):
        values = [
            mpmath.re(of(*map(mpmath.mpf, p))) for p in zip(*(x.tolist() for x in xs), strict=True)
        ]
        high = [float(v) for v in values]
        low = [
            float(v - h) if mpmath.isfinite(v) else 0.0 for v, h in zip(values, high, strict=True)
        ]
    return torch.tensor(high, dtype=torch.float64), torch.tensor(low, dtype=torch.float64)


def _far(y: Tensor, true: Tensor, rest: Tensor) -> Tensor:
    unit = torch.ldexp(torch.ones_like(true), torch.frexp(true).exponent.clamp(min=-1021) - 53)
    found = ((y - true) - rest).abs() / unit
    return torch.where((y == true) & ~true.isfinite(), 0.0, found)


def table() -> str:
    """Rows of op, domain, and for each type the error of lenz and eager's; bounds on GPUs."""
    types = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    names = [f"{str(t)[6:]}, eager" for t in types]
    rows = [f"| function | domain | {' | '.join(names)} | bound f32 | bound f32 GPU |\n"]
    rows.append("|---" * (len(types) + 4) + "|\n")
    found: dict[str, list[str]] = {op.name: [] for op in functions()}
    for t in types:
        seen = {
            op.name: f"{a:.2f}, {b:.3g}"
            for op, a, b in measured(t, 1000 if t.itemsize == 8 else 1 << 20)
        }
        for name, cells in found.items():
            cells.append(seen.get(name, ""))
    for op in functions():
        pairs = op.domain if isinstance(op.domain[0], tuple) else (op.domain,)
        domain = " x ".join(f"{low:g}..{high:g}" for low, high in pairs)  # type: ignore[misc]
        bounds = (f"{op.ulp:g}", f"{op.form('cuda').ulp or op.ulp:g}")
        rows.append(f"| `{op.name}` | {domain} | {' | '.join((*found[op.name], *bounds))} |\n")
    return "".join(rows)


if __name__ == "__main__":
    page = DOCS / "numerics.md"
    head, _, rest = page.read_text().partition(START)
    page.write_text(head + START + "\n" + table() + "\n" + END + rest.partition(END)[2])
