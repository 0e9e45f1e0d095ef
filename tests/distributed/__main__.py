"""More random programs of collectives than the tests run: python -m tests.distributed --seeds 50"""

from __future__ import annotations

import argparse
import sys

from tests.distributed.checks import random_programs
from tests.distributed.ranks import failures

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--from", type=int, default=1000, dest="first")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    chosen = range(given.first, given.first + given.seeds)
    said = failures(given.ranks, random_programs(chosen), given.device)
    print(said or f"{given.seeds} programs on {given.ranks} ranks: as in eager")
    sys.exit(bool(said))
