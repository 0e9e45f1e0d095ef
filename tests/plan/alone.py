"""A process that runs plans from their text, and compiles nothing: it never imports the compiler.

It reads the name of a file per line. The file holds a plan and the keys of its kernels; the store
has these and the constants. Arguments are in files beside it, to which results, and arguments after
the call, go as well. A file holds one tensor, since it cannot hold a memory as two types (real and
complex, say). The answer is a line of JSON: an error, and modules of the compiler that have been
imported.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import torch

from lenz.ir.plan import Boxed, Plan
from lenz.ir.reader import read
from lenz.loading import kernels, load
from lenz.runtime.constants import unpacked
from lenz.runtime.store import store_at

COMPILERS = ("torch._dynamo", "torch._functorch.aot_autograd", "sympy")
ROOMS = ("frontend", "lower", "opt", "schedule", "ops", "pipeline", "machine.cpu.llvm.module")


def loaded(case: dict[str, Any]) -> Boxed:
    """The callable of a plan."""
    plan = read(case["plan"])
    assert isinstance(plan, Plan)
    store = store_at(case["store"])
    functions, alive = kernels(plan, case["keys"], store)
    found = [(c, store.get("constant", c.content)) for c in plan.constants]
    constants = {c.name: unpacked(data, c.type.device) for c, data in found if data is not None}
    return load(plan, functions, alive, constants, fast=case["native"], store=store)


def run(path: str) -> None:
    """Run one plan."""
    case = torch.load(path, weights_only=True)
    args = [torch.load(f"{path}.{k}", weights_only=True) for k in range(case["count"])]
    given = list(args)
    torch.set_num_threads(case["threads"])
    torch.set_rng_state(case["random"])
    results = loaded(case)(given)
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
