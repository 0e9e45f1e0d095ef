"""What a program gives, as named values, and when two outcomes agree.

Values that are exact have to be equal. Rounded ones are held against the program in float64: the
error may be twice eager's, and some units of the last place of the coarsest type that a value was
rounded to on its way, since sums may be taken in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.fuzz.program import ROUNDED, Machine, Program

__all__ = ["Outcome", "agree", "outcome"]

ULPS = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 256, torch.float64: 4096}
"""Units in the last place of the largest value that a rounded one may be off by.

The ideal is of float64 as well, and eager adds numbers one after another: float64 has one unit
for each element of the longest value where that has more.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The values by name, and which of them share memory."""

    values: dict[str, Any]
    shared: frozenset[tuple[str, str]]


def outcome(
    p: Program, fn: Callable[..., Any], args: Sequence[Any], as_traced: bool = False
) -> Outcome:
    """Call a function of the program's arguments: its results, arguments after it, gradients.

    `as_traced` says that the gradients start from ones laid as AOTAutograd traces them.
    """
    with getattr(torch, p.mode)() if p.mode else nullcontext():
        got = fn(*args)
    assert len(got) == len(p.results), f"{len(got)} results instead of {len(p.results)}"
    values: dict[str, Any] = {f"result {n}": x for n, x in zip(p.results, got, strict=True)}
    values |= {f"requires_grad of {n}": _wants(x) for n, x in zip(p.results, got, strict=True)}
    given = {s.name: a for s, a in zip(p.specs, args, strict=True)}
    values |= {f"argument {n}": a for n, a in given.items()}
    shared = _shared(values)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.is_leaf and a.requires_grad]
    outs = [x for x in got if isinstance(x, torch.Tensor) and x.requires_grad]
    outs = list({id(x): x for x in outs if not any(x is a for a in leaves)}.values())
    if leaves and outs:
        # Ones would hide what sums over an axis do to a gradient.
        seeds = [
            torch.arange(x.numel(), device=x.device).remainder(5).sub(2).view(x.shape).to(x.dtype)
            for x in outs
        ]
        if as_traced:
            seeds = [tangent(x, seed) for x, seed in zip(outs, seeds, strict=True)]
            # Of views it takes their base for a result, with the gradients of all of them.
            bases = {id(x._base): x._base for x in outs if x._base is not None}
            for base in (x for x in bases.values() if x.grad_fn is not None):
                base.register_hook(partial(tangent, base))
        found = torch.autograd.grad(outs, leaves, seeds, allow_unused=True)
        values |= {f"gradient {k}": g for k, g in enumerate(found)}
    plain = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in values.items()}
    return Outcome(plain, shared)


def tangent(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """The gradient of a result as AOTAutograd traces it: laid as the result where that is dense.

    A caller's own it takes for such a one if it differs in dimensions of size 1 alone, whose
    strides then are the caller's in eager, and the result's in the trace.
    """
    if not x.is_contiguous(memory_format=torch._prims_common.suggest_memory_format(x)):
        return seed
    laid = torch.empty_strided(x.shape, x.stride(), dtype=seed.dtype, device=seed.device)
    return laid.copy_(seed)


def _wants(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _shared(values: dict[str, Any]) -> frozenset[tuple[str, str]]:
    """Pairs of tensors in the same storage."""
    places: dict[int, list[str]] = {}
    for n, x in values.items():
        if isinstance(x, torch.Tensor) and x.numel():
            places.setdefault(x.untyped_storage().data_ptr(), []).append(n)
    return frozenset((a, b) for ns in places.values() for a in ns for b in ns if a < b)


def agree(
    p: Program, m: Machine, got: Outcome, want: Outcome, ideal: Outcome | None,
    told: Sequence[Outcome] = (),
) -> None:  # fmt: skip
    """Assert that an outcome is what eager has, where `ideal` is the program in float64.

    Strides may also be those of one of `told`: where fake tensors tell other ones than eager's.
    """
    assert got.values.keys() == want.values.keys(), f"{[*got.values]} for {[*want.values]}"
    longest = max(
        (x.numel() for x in want.values.values() if isinstance(x, torch.Tensor)), default=0
    )
    for name, y in want.values.items():
        z = None if ideal is None else ideal.values.get(name)
        exact = name.startswith(("result", "argument")) and m.level[name.split()[1]] < ROUNDED
        fakes = [t for o in told if isinstance(t := o.values.get(name), torch.Tensor)]
        try:
            if not any(are_strided_alike(got.values[name], t) for t in fakes):
                same_strides(got.values[name], y)
            same(got.values[name], y, z, exact, _coarsest(p, m, name), longest)
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from None
    for pair in sorted(got.shared ^ want.shared):
        who = "eager" if pair in want.shared else "ours"
        raise AssertionError(f"aliasing: {pair} share memory in {who} only")
    for a, b in sorted(want.shared):
        x, y = (_start(o.values[b]) - _start(o.values[a]) for o in (got, want))
        assert x == y, f"{b}: {x} bytes behind {a} instead of {y}"


def _start(t: torch.Tensor) -> int:
    """The place of the first element in its memory, in bytes.

    Only its distance from others counts: eager's `select_scatter` of `x[1:]` keeps the offset of
    `x[1:]` in new memory, which lenz does not.
    """
    return int(t.storage_offset()) * t.itemsize


def _coarsest(p: Program, m: Machine, name: str) -> float:
    """The coarsest epsilon on the way to a value; a gradient comes by way of all of them.

    Eager's gradient of digamma is off by 5e-10 in f64, which is the ideal here: it has four terms
    of a series. Its variance of 131,072 numbers is off by 2e-11, where that of lenz is exact.
    """
    kind, _, of = name.partition(" ")
    if kind in ("result", "argument"):
        return m.unit[of]
    least = torch.finfo(torch.float32).eps if "digamma" in p.source() else 0.0
    return max(least, *m.unit.values())


def are_strided_alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Say whether the strides that count are the same, as torch's `check_significant_strides` does.

    That of a dimension of one leads nowhere, and in eager is what its iterators leave there.
    """
    if x.shape != y.shape or not y.numel():
        return x.shape == y.shape
    pairs = zip(x.stride(), y.stride(), y.shape, strict=True)
    return all(a == b for a, b, size in pairs if size != 1)


def same_strides(x: Any, y: Any) -> None:
    """Assert that tensors have the same type, shape and strides."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        assert x.dtype is y.dtype and x.shape == y.shape, (
            f"{x.dtype} {tuple(x.shape)} instead of {y.dtype} {tuple(y.shape)}"
        )
        assert are_strided_alike(x, y), f"strides {x.stride()} instead of {y.stride()}"


def same(x: Any, y: Any, z: Any, exact: bool, unit: float = 0.0, longest: int = 0) -> None:
    """Assert that x is y within what rounding explains; z is the ideal value, if there is one.

    `unit` is the coarsest epsilon on the way to y, `longest` the most elements of one value.
    """
    if not isinstance(y, torch.Tensor):
        assert (x is None) == (y is None) and x == y, f"{x} instead of {y}"
        return
    assert x.dtype is y.dtype and x.shape == y.shape, (
        f"{x.dtype} {tuple(x.shape)} instead of {y.dtype} {tuple(y.shape)}"
    )
    if torch.equal(x, y):
        return
    if not y.dtype.is_floating_point:
        bad = (x != y).cpu()
        assert not bad.any(), f"{_first(bad, x, y)}"
        return
    wide, eager = x.double().cpu(), y.double().cpu()  # on GPUs masks have at most 25 dimensions
    z = eager if z is None or z.shape != y.shape else z.double().cpu()
    equal = (wide == eager) | (wide.isnan() & eager.isnan())
    if exact and ((eager == z) | (eager.isnan() & z.isnan())).all():
        assert equal.all(), f"{_first(~equal, x, y)}, which is exact"
        return
    known = eager.isfinite() & z.isfinite()
    worst = (eager - z)[known].abs().max() if known.any() else torch.tensor(0.0)
    largest = z[known].abs().max().clamp(min=1.0) if known.any() else torch.tensor(1.0)
    ulps = ULPS | {torch.float64: max(ULPS[torch.float64], longest)}
    step = max(n * torch.finfo(d).eps for d, n in ulps.items() if d is y.dtype or is_unit(d, unit))
    bound = 2 * worst + step * largest
    off = longest * unit / 2  # of a sum, if all of its terms are rounded to one side
    if worst > 0 and known.any() and z[known].abs().max() < off:
        bound = bound.clamp(min=off)  # terms cancel, and how far eager is off is chance
    good = equal | ((wide - z).abs() <= bound)
    # Where eager is not finite and the ideal is, or the other way round, a type has overflowed.
    free = eager.isfinite() != z.isfinite()
    good |= free
    assert good.all(), f"{_first(~good, x, y)}, ideally {_at(~good, z)}, bound {float(bound):.3g}"


def is_unit(dtype: torch.dtype, unit: float) -> bool:
    """True for the type with that epsilon."""
    return bool(torch.finfo(dtype).eps == unit)


def _at(bad: torch.Tensor, x: torch.Tensor) -> str:
    return str(x[tuple(bad.nonzero()[0].tolist())].item())


def _first(bad: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> str:
    place = bad.nonzero()[0].tolist()
    n = int(bad.sum())
    return f"{_at(bad, x)} instead of {_at(bad, y)} at {place} ({n} of {bad.numel()} differ)"
