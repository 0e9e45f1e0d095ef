"""More random programs than the tests run: python -m tests.distributed --seeds 50 [--meshes]"""

from __future__ import annotations

import argparse
import sys

from tests.distributed.checks import random_mesh_programs, random_programs
from tests.distributed.ranks import failures

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--from", type=int, default=1000, dest="first")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--meshes", action="store_true", help="of distributed tensors")
    given = parser.parse_args()
    chosen = range(given.first, given.first + given.seeds)
    draw = random_mesh_programs if given.meshes else random_programs
    said = failures(given.ranks, draw(chosen), given.device)
    print(said or f"{given.seeds} programs on {given.ranks} ranks: as in eager")
    sys.exit(bool(said))
