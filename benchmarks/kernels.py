"""Steady state of single kernels, 12 kinds in one or more sizes, for one count of threads.

A worker: `python -m benchmarks.kernels --threads N` prints its rows as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import (
    CONTESTANTS,
    PEER,
    Call,
    Row,
    agree,
    clock_of,
    compiled,
    interleave,
    note,
    row,
)

Args = tuple[Tensor, ...]
F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size.  `mutates`: it stores into its arguments, so none are shared."""

    kind: str
    size: str
    fn: Callable[..., Any]
    args: Callable[[], Args]
    rtol: float = 1e-4
    atol: float = 2e-6
    mutates: bool = False
    quick: bool = False


def normal(*shape: int, dtype: torch.dtype = F32) -> Callable[[], Args]:
    """Arguments: one tensor of normal numbers."""
    return lambda: (torch.randn(shape).to(dtype),)


def chain(x: Tensor) -> Tensor:
    """The five functions of the rows above, on one another."""
    return F.gelu(F.silu(torch.sigmoid(torch.tanh(torch.exp(x)))))


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def masked_softmax(x: Tensor) -> Tensor:
    """Half of the numbers are masked, as in causal attention."""
    later = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(x.masked_fill(later, -torch.inf), -1)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def norm_args(rows: int, columns: int) -> Callable[[], Args]:
    return lambda: (torch.randn(rows, columns), torch.randn(columns), torch.randn(columns))


def sum_rows(x: Tensor) -> Tensor:
    return x.sum(0)


def transpose_relu(x: Tensor) -> Tensor:
    return torch.relu(x.t()).contiguous()


def embedding(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table) * 2.0


def argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def cumsum(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def adam(p: Tensor, m: Tensor, v: Tensor, g: Tensor, copy: Tensor) -> None:
    """One step of Adam: f32 state, bf16 gradient, and the bf16 copy of the parameters renewed."""
    g32 = g.float()
    m.mul_(0.9).add_(g32, alpha=0.1)
    v.mul_(0.999).addcmul_(g32, g32, value=0.001)
    p.sub_(1e-3 * (m / 0.271) / ((v / 0.002997).sqrt() + 1e-8))
    copy.copy_(p)


def adam_args(n: int) -> Callable[[], Args]:
    def make() -> Args:
        p, g = torch.randn(n), torch.randn(n).to(BF16)
        return p, torch.randn(n) * 0.1, torch.rand(n) * 0.01, g, p.to(BF16)

    return make


def cases() -> list[Case]:
    """Every kernel in every size, f32 unless the size says otherwise."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "exp": torch.exp,
        "tanh": torch.tanh,
        "gelu": F.gelu,
        "chain of five": chain,
    }
    made: list[Case] = []
    for kind, fn in functions.items():
        for size, n in (("64k", 1 << 16), ("1M", 1 << 20), ("16M", 1 << 24)):
            if size != "64k" or kind == "chain of five":
                made.append(Case(kind, size, _own(fn), normal(n), quick=size == "1M"))
    for rows in (512, 4096):
        size, quick = f"{rows}x1024", rows == 512
        made.append(Case("softmax", size, softmax, normal(rows, 1024), quick=quick))
    for rows in (512, 4096):
        size, quick = f"{rows}x1024 bf16", rows == 512
        args = normal(rows, 1024, dtype=BF16)
        made.append(Case("softmax bf16", size, softmax, args, 1.6e-2, 1e-3, quick=quick))
    for columns in (1024, 1000):
        args = norm_args(512, columns)
        made.append(Case("layer_norm", f"512x{columns}", layer_norm, args, quick=columns == 1000))
    index = lambda: (torch.randn(30522, 768), torch.randint(0, 30522, (4096,)))
    return [
        *made,
        Case("masked softmax", "8x256x256", masked_softmax, normal(8, 256, 256), quick=True),
        Case("sum over dim 0", "4096x1024", sum_rows, normal(4096, 1024), quick=True),
        Case("transpose + relu", "1024x1024", transpose_relu, normal(1024, 1024), quick=True),
        Case("transpose + relu", "4096x4096", transpose_relu, normal(4096, 4096)),
        Case("embedding * 2", "4096x768", embedding, index, quick=True),
        Case("argmax", "512x1024", argmax, normal(512, 1024), quick=True),
        Case("argmax", "4096x4096", argmax, normal(4096, 4096)),
        Case("cumsum", "512x1024", cumsum, normal(512, 1024), atol=1e-5, quick=True),
        Case("cumsum", "4096x4096", cumsum, normal(4096, 4096), atol=1e-5),
        Case("Adam", "10M", adam, adam_args(10_000_000), atol=1e-5, mutates=True),
        Case("Adam", "1M", adam, adam_args(1 << 20), atol=1e-5, mutates=True, quick=True),
    ]


def _own(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A Python function around a builtin, so that every contestant compiles its own copy."""

    def call(x: Tensor) -> Tensor:
        return fn(x)

    return call


def compare(case: Case, contestants: tuple[str, ...]) -> dict[str, Call]:
    """Compile `case` with each contestant, check results against eager, and return the calls."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    args = case.args()
    expected_args = tuple(a.clone() for a in args)
    expected = case.fn(*expected_args)
    calls: dict[str, Call] = {}
    for name in contestants:
        mine = tuple(a.clone() for a in args) if case.mutates else args
        fn = compiled(case.fn, name)
        got = fn(*mine)
        agree((expected, expected_args), (got, mine), case.rtol, case.atol)
        calls[name] = lambda fn=fn, mine=mine: fn(*mine)  # type: ignore[misc]
    return calls


def measure(case: Case, seconds: float, clock: str) -> Row:
    """Return the row of one case; a failure becomes a row with `failed`."""
    head: Row = {"kind": case.kind, "size": case.size, "threads": torch.get_num_threads()}
    try:
        calls = compare(case, CONTESTANTS)
    except Exception as e:  # noqa: BLE001 - one bad case must not hide the others
        note(f"{case.kind} {case.size}: FAILED {type(e).__name__}: {e}")
        return {**head, "failed": f"{type(e).__name__}: {str(e).splitlines()[0]}"}
    made = {**head, **row(interleave(calls, seconds, clock_of(clock)))}
    note(
        f"{case.kind:16} {case.size:14} {head['threads']} thr  eager {made['eager_us']:9.1f}"
        f"  lenz {made['lenz_us']:9.1f}  peer {made[f'{PEER}_us']:9.1f} us"
        f"   lenz/eager {made['lenz/eager']:5.2f}  lenz/peer {made[f'lenz/{PEER}']:5.2f}"
    )
    return made


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--only", default="", help="kinds that contain this text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = [
        c
        for c in cases()
        if options.only in f"{c.kind} {c.size}" and (c.quick or not options.quick)
    ]
    if options.quick:
        chosen = [c for c in chosen if c.quick]
    else:
        chosen = [c for c in chosen if (c.kind, c.size) != ("Adam", "1M")]
    seconds = 0.3 if options.quick else 1.5
    print(json.dumps([measure(c, seconds, options.clock) for c in chosen]))


if __name__ == "__main__":
    main()
