"""Functions of the user's files."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lenz.errors import UserError, near_names


def function_of(file: str, name: str) -> Callable[..., Any]:
    """Run a Python file, and return one of its functions.

    The file may import its neighbours, as under `python FILE`. Each call runs it again, with its
    own globals. Raises UserError if the file or the function is missing.
    """
    path = Path(file)
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = runpy.run_path(str(path))
    fn: Callable[..., Any] | None = found.get(name)
    if fn is None or not callable(fn):
        hint = near_names(name, (k for k, v in found.items() if callable(v)))
        raise UserError(f"{path} has no function {name!r}", hint=hint)
    return fn
