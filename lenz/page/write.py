"""Data as one HTML file that loads nothing: a template, a style sheet and scripts beside it.

Names of ops and files and lines of the user's are data of the page, never its text: they stand in
a block of JSON, where no character can end the block, and the scripts put them into text nodes.
Texts of kernels are many and alike, so that they are compressed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

SCRIPTS = ("plots.js", "code.js", "page.js")
HEAVY = ("kernels", "nodes", "source", "values", "args")  # read only when something is selected


def page(data: Mapping[str, Any]) -> str:
    """The HTML of a report."""
    graphs = [{**g, "steps": [dict(s) for s in g["steps"]]} for g in data["graphs"]]
    heavy = [_taken(g) | {"steps": [_taken(s) for s in g["steps"]]} for g in graphs]
    style, script = _file("page.css"), "\n".join(map(_file, SCRIPTS))
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    made = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return made.from_string(_file("page.html")).render(
        policy=f"{policy}; base-uri 'none'; form-action 'none'",
        style=style,
        script=script,
        data=as_script({**data, "graphs": graphs}),
        heavy=base64.b64encode(gzip.compress(json.dumps(heavy).encode(), 6, mtime=0)).decode(),
    )


def _taken(row: dict[str, Any]) -> dict[str, Any]:
    """The heavy fields, which the row loses."""
    return {name: row.pop(name) for name in HEAVY if name in row}


def as_script(data: object) -> str:
    """JSON that may stand in a script element: no `<` can end it, no character ends a line."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _file(name: str) -> str:
    """A file of this room."""
    return (files("lenz.page") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The source expression of the Content Security Policy for an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
