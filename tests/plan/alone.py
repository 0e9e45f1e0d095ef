"""A process that runs plans from their text, and compiles nothing: it never imports the compiler.

It reads the name of a file per line. The file holds a plan, the keys of its kernels in the store
and constants; arguments are in files beside it. The answer is a line of JSON: an error, and modules
of the compiler that have been imported. Results, and arguments after the call, go to such files.
A file holds one tensor, since it cannot hold a memory as two types, real and complex say.
"""

from __future__ import annotations

import json
import sys
import traceback

import torch

from lenz.ir.plan import Plan
from lenz.ir.reader import read
from lenz.loading import kernels, load
from lenz.runtime.store import store_at

COMPILERS = ("torch._dynamo", "torch._functorch.aot_autograd", "sympy")
ROOMS = ("frontend", "lower", "opt", "schedule", "ops", "pipeline", "machine.cpu.llvm.module")


def run(path: str) -> None:
    """Run one plan."""
    case = torch.load(path, weights_only=True)
    plan = read(case["plan"])
    assert isinstance(plan, Plan)
    functions, alive = kernels(plan, case["keys"], store_at(case["store"]))
    args = [torch.load(f"{path}.{k}", weights_only=True) for k in range(case["count"])]
    given = list(args)
    torch.set_rng_state(case["random"])
    results = load(plan, functions, alive, case["constants"])(given)
    for k, value in enumerate((*results, *args)):
        torch.save(value, f"{path}.{k}")


def main() -> None:
    for line in sys.stdin:
        error = ""
        try:
            run(line.strip())
        except Exception:  # noqa: BLE001  # the parent shows it
            error = traceback.format_exc()
        names = (*COMPILERS, *(f"lenz.{r}" for r in ROOMS))
        answer = {"error": error, "imported": [m for m in names if m in sys.modules]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
