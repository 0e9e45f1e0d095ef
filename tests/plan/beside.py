"""Every plan that is compiled runs in another process as well, which compiles nothing.

`beside` is the other process, and what is put in place of `compile_program` meanwhile. With
TEST_ALONE=1 it is there for all tests (tests/conftest.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lenz import pipeline
from lenz.context import Context
from lenz.frontend import FxProgram
from lenz.ir.graph import Atom, Named
from lenz.ir.plan import Boxed, CallStep, Plan
from lenz.ir.printer import show
from lenz.pipeline import Compiled
from lenz.runtime import executor
from lenz.runtime.store import store_in
from tests.fuzz.check import copied

CALLS = 2  # of each plan that are compared
TORCHS = ("aten.", "prims.", "lenz.", "py.", "higher_order.", "_c10d_functional.")
compile_program = pipeline.compile_program


class Beside:
    """The other process.

    plans  how many plans have run there, and `calls` how often
    left   plans and calls that have not, by the reason
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.lock = folder / "case", threading.Lock()
        self.plans = self.calls = 0
        self.left = Counter[str]()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.plan.alone"], cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def compile_program(self, program: FxProgram, cx: Context, key: str | None = None) -> Compiled:
        """The products of a compilation; its calls are compared with those of the other process."""
        made, store = compile_program(program, cx, key), store_in(cx.options)
        if why := "no store" if store is None else untold(made.plan):
            self.left[why] += 1
            return made
        plan, constants = made.complete
        for name, data in constants.items():
            store.put("constant", name, data)
        how = {"store": cx.options.cache_dir, "native": cx.options.native}
        case: dict[str, Any] = {"plan": show(plan), "keys": made.entry.keys, **how}
        count = 0

        def run(args: list[Any]) -> Sequence[Any]:
            nonlocal count
            if why := "called again" if count >= CALLS else foreign(args):
                self.left[why] += 1
                return made.call(args)
            count += 1
            self.plans += count == 1
            with self.lock:
                return self.compared(case, made.call, args)

        return replace(made, call=run)

    def compared(self, case: dict[str, Any], call: Boxed, args: list[Any]) -> Sequence[Any]:
        """The results of a call, after the same call in the other process."""
        with torch.inference_mode(False):
            given = copied(args)
        mine = [*args]
        case = {**case, "random": torch.get_rng_state(), "threads": torch.get_num_threads()}
        try:
            want, error = call(args), None
        except Exception as e:  # noqa: BLE001  # it is raised below
            want, error = [], e
        said = self.answer(case, given)
        if error is not None:
            assert type(error).__name__ in said, f"no {error!r} but {said}\n{case['plan']}"
            raise error
        assert not said, f"{said}\n{case['plan']}"
        for k, y in enumerate((*want, *mine)):
            x = torch.load(f"{self.path}.{k}", weights_only=True)
            same(x, y, f"value {k} of\n{case['plan']}")
        return want

    def answer(self, case: dict[str, Any], args: Sequence[Any]) -> str:
        """Have the other process run a call; the error that it has raised."""
        torch.save({**case, "count": len(args)}, self.path)
        for k, a in enumerate(args):
            torch.save(a, f"{self.path}.{k}")
        print(self.path, file=self.child.stdin, flush=True)
        line = self.child.stdout.readline()
        assert line, "the other process has ended"
        said = json.loads(line)
        assert not said["imported"], f"it has imported {said['imported']}"
        self.calls += 1
        return str(said["error"])


def untold(p: Plan) -> str:
    """Why no other process can run a plan: no text holds objects and ops of the user's program."""
    if p.objects:
        return "takes objects of the program"
    calls = [s for s in p.flat if isinstance(s, CallStep)]
    ops = [op for s in calls for a in (*s.args, *(a for _, a in s.kwargs)) for op in ops_in(a)]
    told = all(op.startswith(TORCHS) for op in (*ops, *(s.op for s in calls)))
    return "" if told else "calls ops of the program"


def ops_in(a: Atom) -> list[str]:
    """The ops that a higher-order op is given."""
    if isinstance(a, tuple):
        return [op for x in a for op in ops_in(x)]
    return [a.value] if isinstance(a, Named) and a.kind == "op" else []


def foreign(args: Sequence[Any]) -> str:
    """Why arguments are not sent to another process."""
    if executor.modes():
        return "called under a mode"
    for a in args:
        if isinstance(a, Tensor):
            is_plain = type(a) in (Tensor, torch.nn.Parameter) and a.device.type == "cpu"
            if not is_plain or a.layout is not torch.strided:
                return f"given a {type(a).__name__} on {a.device.type}"
        elif not isinstance(a, (bool, int, float, type(None))):
            return f"given a {type(a).__name__}"
    return ""


def same(x: Any, y: Any, message: str) -> None:
    """The same code computed both, so that they are equal to the last bit."""
    if not isinstance(y, Tensor):
        assert x == y or x != x, message
        return
    assert x.stride() == y.stride(), message
    torch.testing.assert_close(
        x, y, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{m}\n{message}"
    )


@contextmanager
def beside(folder: Path) -> Iterator[Beside]:
    """Plans that are compiled meanwhile run in another process as well."""
    found, before = Beside(folder), pipeline.compile_program
    pipeline.compile_program = found.compile_program
    try:
        yield found
    finally:
        pipeline.compile_program = before
    found.child.stdin.close()
    assert found.child.wait(60) == 0
