"""The table of options, for `python -m lenz options` and the documentation."""

from __future__ import annotations

from dataclasses import fields

from lenz.options import PREFIX, Options, choices_of


def options_table() -> str:
    """Return the options as a Markdown table, for the documentation."""
    rows = [
        "| option | environment | default | changes code | what it does |",
        "|---|---|---|---|---|",
    ]
    for f in fields(Options):
        shown = ",".join(f.default) if isinstance(f.default, tuple) else str(f.default)
        choices = () if isinstance(f.default, bool) else choices_of(f.type)
        help = f.metadata["help"] + (f" Choices: {', '.join(choices)}." if choices else "")
        keyed = "yes" if f.metadata["key"] else "no"
        cells = (f"`{f.name}`", f"`{PREFIX}{f.name.upper()}`", f"`{shown}`" if shown else "")
        rows.append(f"| {' | '.join((*cells, keyed, help))} |")
    return "\n".join(rows) + "\n"
