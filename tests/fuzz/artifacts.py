"""Programs by way of an artifact: `torch.export`, `lenz.export`, a file, and `lenz.load`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lenz
from lenz.errors import Unsupported, UserError
from tests.fuzz.compare import Outcome
from tests.fuzz.program import Program

__all__ = ["Skipped", "exported"]


class Skipped(Exception):
    """Why nothing is known of a program."""


def exported(p: Program, device: str, want: Outcome) -> tuple[Outcome, Outcome]:
    """What the loaded artifact gives, and torch's own program; the rest is what eager has.

    Raises Skipped if torch cannot export the program, or lenz says that a file cannot hold it.
    """
    f = p.function()

    class Module(nn.Module):
        def forward(self, *args: Any) -> Any:
            return f(*args)

    def arguments() -> list[Any]:
        return [a.detach() if isinstance(a, torch.Tensor) else a for a in p.arguments(device)]

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.lenz"
        try:
            program = torch.export.export(Module(), tuple(arguments()))
            decomposed: Any = program.run_decompositions({}).module()
            theirs = outcome_of(p, decomposed, arguments(), want)
        except Exception as e:  # torch's own half
            raise Skipped(f"torch.export: {type(e).__name__}: {e}") from e
        try:
            lenz.export(program, path, levels=("host",))
        except (Unsupported, UserError) as e:
            raise Skipped(str(e)) from e
        return outcome_of(p, lenz.load(path), arguments(), want), theirs


def outcome_of(p: Program, run: Callable[..., Any], args: list[Any], want: Outcome) -> Outcome:
    """Results and arguments of a call, beside what else eager has."""
    got: Sequence[Any] = run(*args)
    assert len(got) == len(p.results), f"{len(got)} results instead of {len(p.results)}"
    results = {f"result {n}": x for n, x in zip(p.results, got, strict=True)}
    given = {f"argument {s.name}": a for s, a in zip(p.specs, args, strict=True)}
    return Outcome({**want.values, **results, **given}, frozenset())
