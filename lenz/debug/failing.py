"""A graph that cannot be compiled raises an error, or runs in eager after a warning."""

from __future__ import annotations

import warnings
from functools import cache

from torch.fx import GraphModule

from lenz.debug.counters import count
from lenz.debug.trace import Recorder
from lenz.errors import REPORT, UNSAVED, InternalError, Missing, Unsupported, UserError
from lenz.ir.plan import Boxed
from lenz.options import Options


def why(e: Exception, recorder: Recorder, kind: str, options: Options) -> str:
    """The reason to run a graph in eager. Raises errors that the user can fix or wants raised."""
    stops = options.on_error == "raise"
    if isinstance(e, UserError) and (stops or not isinstance(e, Missing)):
        raise e
    if isinstance(e, (Unsupported, Missing)):
        return f"lenz runs a graph in eager: {e}"
    found = fault(e, recorder, kind, options)
    if stops:
        raise found.with_traceback(e.__traceback__) from e
    told = found.located(hint=REPORT if found.repro else UNSAVED)
    return f"lenz failed on a graph and runs it in eager: {told}"


def fault(e: Exception, recorder: Recorder, kind: str, options: Options) -> InternalError:
    """The error that names the pass, the line and the saved repro."""
    from lenz.debug.blame import blame
    from lenz.debug.repro import write_repro

    (line, where), what = blame(e), f"{type(e).__name__}: {e}"
    found = e if isinstance(e, InternalError) else InternalError(what, where=where)
    if found.repro:
        return found
    found = found.located(pass_name=recorder.failed, line=line)
    # Without the graph's number, so that a repeated fault is written once.
    return found.located(repro=write_repro(e, found, recorder.offered, f"graph.{kind}", options))


def in_eager(e: Exception, recorder: Recorder, kind: str, options: Options, run: Boxed) -> Boxed:
    """Warn that the graph runs in eager because of `e`, and return `run`.

    Raises the same errors as `why`. Results of a forward half get eager's strides, because a
    backward half compiled for other strides rejects them.
    """
    say(why(e, recorder, kind, options))
    count(eager=1)
    return run


def recorder_of(gm: GraphModule, kind: str, options: Options) -> Recorder:
    """A recorder for a fault in a graph that has no program."""
    recorder = Recorder(kind, options.logs)
    recorder.offered["dynamo"] = lambda: gm.print_readable(print_output=False)
    recorder.offered["runnable"] = lambda: script(gm, options)
    return recorder


def script(gm: GraphModule, options: Options) -> str:
    """A script that compiles a graph again."""
    from lenz.debug.repro import runnable

    return runnable(gm, options)


@cache
def say(why: str) -> None:
    """Warn once per text; torch resets the filters of `warnings`, which would repeat it."""
    warnings.warn(why, stacklevel=2)
