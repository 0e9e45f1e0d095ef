"""`python -m examples.demo` from the root of the repository, or `make demo`."""

from __future__ import annotations

import argparse
import sys

from examples.demo.run import demo
from lenz.errors import LenzError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.demo")
    parser.add_argument("--warm", default="", help=argparse.SUPPRESS)
    try:
        sys.exit(demo(parser.parse_args().warm))
    except LenzError as e:
        sys.exit(f"lenz: {e}")
