"""Functions of the user's files; plans of a debug folder as scripts."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lenz.errors import UserError, near_names
from lenz.machines import load_kernels
from lenz.private import reading
from lenz.runtime.constants import unpacked
from lenz.runtime.script import main as run_script


def function_of(file: str, name: str) -> Callable[..., Any]:
    """Run a Python file, and return one of its functions.

    The file may import its neighbours, as under `python FILE`, and finds no arguments but those
    that the caller put behind its name in `sys.argv`. Each call runs it again, with its own
    globals. Raises UserError if the file cannot be read or lacks the function.
    """
    with reading(file) as source:
        text = source.read()
    try:
        compile(text, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as e:
        raise UserError(f"{file} cannot be compiled: {e}") from e
    folder = str(Path(file).parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.argv = sys.argv if sys.argv[:1] == [file] else [file]  # not the arguments of lenz
    found = runpy.run_path(file)
    fn: Callable[..., Any] | None = found.get(name)
    if fn is None or not callable(fn):
        hint = near_names(name, (k for k, v in found.items() if callable(v)))
        raise UserError(f"{file} has no function {name!r}", hint=hint)
    return fn


def time_plan(module: dict[str, Any], file: str, rounds: int = 30) -> None:
    """Run a plan of a debug folder as a script, with the kernels and constants beside it.

    `module` are the globals of the script, `file` its path. Raises UserError if one of these files
    is missing.
    """
    folder = Path(file).resolve().parent
    code = lambda _, loader, c: {n: _beside(folder, f) for n, f in loader.files(c).items()}
    kernels, module["_alive"] = load_kernels(module["KERNELS"], code)
    for name, (place, content) in module["CONSTANTS"].items():
        module[name] = unpacked(_beside(folder, f"{content}.constant"), place)
    run_script(module, kernels, rounds)


def _beside(folder: Path, name: str) -> bytes:
    """A file that the compiler wrote next to a plan."""
    with reading(folder / name, hint="LENZ_DEBUG=1 writes it next to the plan") as file:
        return file.read()
