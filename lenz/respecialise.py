"""Fallback graphs for calls that break an assumption about sizes or addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lenz.context import Context
from lenz.debug.failing import in_eager, script
from lenz.debug.trace import Recorder
from lenz.errors import InternalError
from lenz.frontend import FxProgram, assuming, kept
from lenz.frontend.program import Facts
from lenz.ir.interned import using
from lenz.ir.plan import Boxed, Plan, Region
from lenz.loading import aligned, load
from lenz.machines import Functions
from lenz.options import Options
from lenz.records import dataclass, replace
from lenz.runtime.store import Store, store_in

Compile: TypeAlias = Callable[[FxProgram, Context], Boxed]


@dataclass(frozen=True, slots=True)
class Needs:
    """The values that a plan refers to: constants and sub-modules."""

    constants: Mapping[str, torch.Tensor]
    modules: Mapping[str, Any]


def needs_of(p: Plan, program: FxProgram) -> Needs:
    """What the plan needs from its program."""
    return Needs(constants_of(p, program), program.modules)


def load_program(
    p: Plan, functions: Functions, alive: object, program: FxProgram, cx: Context, again: Compile
) -> Boxed:
    """The callable of a program; `again` compiles its fallbacks."""
    otherwise = Respecialised(program, cx, again)
    needs, store = needs_of(p, program), store_in(cx.options)
    return load_plan(p, functions, alive, needs, cx.options, otherwise, store)


def load_plan(
    p: Plan, functions: Functions, alive: object, needs: Needs, options: Options,
    otherwise: Callable[..., Sequence[Any]], store: Store | None,
) -> Boxed:  # fmt: skip
    """The callable of a plan, which replays CUDA graphs if the options ask for it."""
    given = needs.constants, needs.modules
    run = load(p, functions, alive, *given, otherwise, options.native, store)
    if not any(isinstance(s, Region) for s in p.steps):
        return run
    from lenz.replay import Replayable, Replayed

    fixed = {name: aligned(t) for name, t in needs.constants.items()}
    return Replayed(Replayable(p, functions, fixed, needs.modules, store), run, options)


def constants_of(p: Plan, program: FxProgram) -> dict[str, torch.Tensor]:
    """The constants of a program's plan, by name."""
    names = {n.name: str(n.target) for n in program.gm.graph.nodes if n.op == "get_attr"}
    return {c.name: program.constants[names[c.name]] for c in p.constants}


class Respecialised:
    """The fallbacks of a graph, each compiled at the first call that needs it.

    A fallback keeps the assumptions that hold in that call. A later call may break these too, and
    then runs a fallback of the fallback. A fallback that cannot be compiled runs in eager, or
    raises an InternalError if the options ask for that.
    """

    def __init__(self, program: FxProgram, cx: Context, again: Compile) -> None:
        self._program, self._again = program, again
        self._options, self._target = cx.options, cx.target
        self._made: dict[tuple[object, ...], Boxed] = {}
        self._lock = threading.RLock()

    def __call__(self, args: list[Any], aligned: bool = True) -> Sequence[Any]:
        """Run on boxed arguments; `aligned` is False if one is not at a multiple of 16 bytes."""
        facts = kept(self._program, args)
        key = (aligned, *facts.items())
        with self._lock:  # one thread compiles, the others wait
            run = self._made.get(key) or self._compiled(key, aligned, facts)
        return run(args)

    def _compiled(self, key: tuple[object, ...], aligned: bool, facts: Facts) -> Boxed:
        if aligned and facts == self._program.facts:
            raise InternalError("no assumption is broken", pass_name="plan")
        options = replace(self._options, aligned=self._options.aligned and aligned)
        program = assuming(self._program, facts)
        recorder = Recorder(program.name)
        recorder.offered["runnable"] = lambda: script(program.gm, options)
        try:
            with using():
                run = self._again(program, Context(options, self._target, recorder))
        except Exception as e:  # noqa: BLE001  # the caller does not expect a compiler here
            run = in_eager(e, recorder, program.kind, options, program.eager())
        self._made[key] = run
        return run
