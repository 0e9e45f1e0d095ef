"""`python -m lenz`: the demo, and what there is to know about this installation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lenz.errors import LenzError


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
