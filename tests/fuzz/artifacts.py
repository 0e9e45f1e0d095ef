"""Programs by way of an artifact: `torch.export`, `lenz.export`, a file, and `lenz.load`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

import lenz
from lenz.errors import Unsupported, UserError
from tests.fuzz.compare import Outcome
from tests.fuzz.program import Program

__all__ = ["Skipped", "exported"]


class Skipped(Exception):
    """Why nothing is known of a program."""


def exported(
    p: Program, device: str, wanted: Sequence[Outcome]
) -> Iterator[tuple[Outcome, Outcome]]:
    """What the loaded artifact gives, and torch's own program; the rest is what eager has.

    For each of the program's arguments, whose sizes are dynamic if there are others.
    Raises Skipped if torch cannot export the program, or lenz says that a file cannot hold it.
    """
    f = p.function()

    class Module(nn.Module):
        def forward(self, *args: Any) -> Any:
            return f(*args)

    def arguments(k: int = 0) -> list[Any]:
        given = p.arguments(device, second=bool(k))
        return [a.detach() if isinstance(a, torch.Tensor) else a for a in given]

    def sizes(a: Any) -> dict[int, Any] | None:
        return dict.fromkeys(range(a.dim()), Dim.AUTO) if isinstance(a, torch.Tensor) else None

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.lenz"
        try:
            dynamic = tuple(map(sizes, arguments())) if p.second else None
            program = torch.export.export(
                Module(), tuple(arguments()), dynamic_shapes=dynamic and (dynamic,)
            )
            decomposed: Any = program.run_decompositions({}).module()
            theirs = [outcome_of(p, decomposed, arguments(k), w) for k, w in enumerate(wanted)]
        except Exception as e:  # torch's own half
            raise Skipped(f"torch.export: {type(e).__name__}: {e}") from e
        try:
            lenz.export(program, path, levels=("host",))
        except (Unsupported, UserError) as e:
            raise Skipped(str(e)) from e
        run = lenz.load(path)
        for k, w in enumerate(wanted):
            try:
                got = outcome_of(p, run, arguments(k), w)
            except UserError as e:
                if not k or all(map(as_assumed, arguments(k))):
                    raise
                raise Skipped(str(e)) from e
            yield got, theirs[k]


def as_assumed(a: Any) -> bool:
    """Whether another argument keeps what `torch.export` assumes of dynamic sizes and of strides.

    Sizes are 2 or more, and strides are products of sizes. torch does not check them, lenz does.
    """
    return not isinstance(a, torch.Tensor) or (a.is_contiguous() and min(a.shape, default=2) > 1)


def outcome_of(p: Program, run: Callable[..., Any], args: list[Any], want: Outcome) -> Outcome:
    """Results and arguments of a call, beside what else eager has."""
    got: Sequence[Any] = run(*args)
    assert len(got) == len(p.results), f"{len(got)} results instead of {len(p.results)}"
    results = {f"result {n}": x for n, x in zip(p.results, got, strict=True)}
    for name in {n for pair in want.shared for n in pair} & results.keys():
        # A view of a written argument is one of its new value, with strides of its own.
        x, y = results[name], want.values[name]
        results[name] = torch.empty_strided(
            y.shape, y.stride(), dtype=x.dtype, device=x.device
        ).copy_(x)
    given = {f"argument {s.name}": a for s, a in zip(p.specs, args, strict=True)}
    return Outcome({**want.values, **results, **given}, frozenset())
