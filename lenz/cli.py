"""`python -m lenz`: the demo, and what there is to know about this installation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lenz.errors import LenzError, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 for success, 1 for a fault, 2 for wrong usage."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except LenzError as e:
        print(f"lenz: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lenz", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo", help="real models through eager and lenz, compared and timed"
    )
    demo.add_argument("--warm", default="", help=argparse.SUPPRESS)
    demo.set_defaults(run=_demo)
    return parser


def _demo(parsed: argparse.Namespace) -> int:
    from lenz.demo import demo

    return demo(parsed.warm)


def time_plan(module: dict[str, Any], file: str, rounds: int = 30) -> None:
    """Run a plan of a debug folder as a script: its kernels are linked from the file beside it.

    `module` are the globals of the script, `file` its path.
    """
    from lenz.codegen.llvm.compile import link
    from lenz.debug.trace import OBJECT
    from lenz.runtime.loader import function
    from lenz.runtime.script import main as run_script
    from lenz.runtime.threads import imports

    signatures: dict[str, tuple[int, int]] = module["KERNELS"]
    kernels = {}
    if signatures:
        beside = Path(file).resolve().parent / OBJECT
        if not beside.is_file():
            raise UserError(f"{beside} is missing", hint="LENZ_DEBUG=1 writes it beside the plan")
        library = link(beside.read_bytes(), tuple(signatures), imports())
        module["_library"] = library  # the code lives as long as the module
        kernels = {n: function(library.addresses[n], *s) for n, s in signatures.items()}
    run_script(module, kernels, rounds)
