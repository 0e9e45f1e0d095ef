"""The smallest part of a graph that shows a fault, as a script: by torch's delta debugging.

Each candidate is a script of its own, which is run and judged like any program.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from functools import partial
from os.path import abspath
from typing import Any

import torch
from torch._functorch.fx_minifier import minifier
from torch.fx import GraphModule

from lenz.commands.compare import fresh
from lenz.commands.probe import Bench, Judged, Outcome, Probe
from lenz.debug.oracle import copies
from lenz.debug.repro import runnable
from lenz.debug.trace import new_folder, write_in
from lenz.frontend import FxProgram
from lenz.ir.plan import Boxed

HEAD = "import runpy, sys\nsys.argv = {}\nrunpy.run_path(sys.argv[0])  # the fault needs it"


class EagerRun(Bench):
    """Runs all graphs in eager, and keeps the last one of the probe with its first arguments."""

    program: FxProgram
    args: Sequence[Any] = ()

    def compiled(self, program: FxProgram) -> Boxed:
        """The graph in eager."""
        self.seen.graphs.append(program.name)
        run = program.eager()
        if len(self.seen.graphs) != self.p.last:
            return run
        self.program = program

        def call(args: list[Any]) -> Sequence[Any]:
            self.args = self.args or copies(args)
            return run(args)

        return call


def minimise(p: Probe, want: Outcome, seconds: float) -> str:
    """Write the smallest script that shows a fault of the last graph of a probe; say where it is.

    The search may take so many `seconds`, and so may each run.
    """
    bench, ends = EagerRun(p), time.monotonic() + seconds
    torch.compile(fresh(p.file, p.function), backend=bench.backend)()
    folder = new_folder(str(p.options.debug_dir), f"bisect-{bench.program.name}")
    known: dict[str, str] = {}

    def told(gm: GraphModule, inputs: Sequence[Any], head: str, saved: bool = True) -> str:
        """The error of a graph; "" if it is another one, or if the time has ended."""
        data, text = io.BytesIO(), runnable(gm, bench.options, head, saved)
        torch.save(copies(inputs), data)
        write_in(folder, {"fx_runnable.py": text, "inputs.pt": data.getvalue()})
        if text in known or time.monotonic() > ends:
            return known.get(text, "")
        judged = Judged(Probe(str(folder / "fx_runnable.py"), options=bench.options), seconds)
        found = Outcome() if judged.begin() else judged.run()
        kinds = [x.kind if x.kind == "wrong" else x.what.split(":")[0] for x in (found, want)]
        known[text] = found.what if found.kind and kinds[0] == kinds[1] else ""
        return known[text]

    gm, inputs = GraphModule(bench.program.gm, bench.program.gm.graph), list(bench.args)
    before, heads = len(bench.program.nodes), ("", HEAD.format([abspath(p.file), *p.arguments]))
    head = next((h for h in heads if told(gm, inputs, h)), None)
    if head is None:
        return f"The graph alone, of {before} ops, does not show the fault: {folder}"
    fails: Any = partial(told, head=head)
    small, values = minifier(gm, inputs, fails, lambda gm, inputs: None)
    what = told(small, values, head, saved=False) or told(small, values, head)
    after = sum(n.op == "call_function" for n in small.graph.nodes)
    return f"Made smaller, from {before} ops to {after}: {what}\n    {folder}"
