"""Errors that pass through Dynamo unchanged. Dynamo wraps unknown errors of backends.

`BackendCompilerFailed` hides the class of the error, and its text asks for a report to PyTorch.
"""

from __future__ import annotations

from functools import cache
from traceback import walk_tb
from typing import Any

from torch._dynamo import exc

from lenz.errors import LenzError


def passing(e: LenzError) -> LenzError:
    """The same error, in a subclass of its class that Dynamo lets through.

    Its traceback begins in lenz, not in Dynamo's many frames.
    """
    through = _let_through(type(e))  # type: ignore[arg-type]  # a class has a hash
    made = through.__new__(through)
    exc.ShortenTraceback.__init__(made, *e.args, first_useful_frame=None)  # type: ignore[arg-type]  # it is made of both
    made.__dict__.update(e.__dict__)
    return made.with_traceback(e.__traceback__)


def is_message(e: Exception) -> bool:
    """Say whether the error is a signal to Dynamo: restart, or end the graph here."""
    return isinstance(e, (exc.TorchDynamoException, *exc.exceptions_allowed_to_be_fallback))


def is_of_lenz(e: Exception) -> bool:
    """Say whether the error comes from lenz or its callees, other than AOTAutograd.

    Errors of torch while tracing may be the program's fault.
    """
    frames = (f.f_globals.get("__name__", "") for f, _ in walk_tb(e.__traceback__))
    within = [name for name in frames if name.startswith("lenz.")]
    return bool(within) and within[-1] not in ("lenz.api", "lenz.frontend.capture")


@cache
def _let_through(kind: type[LenzError]) -> type[LenzError]:
    def shortened(self: LenzError) -> LenzError:
        tb = self.__traceback__
        while tb is not None and not tb.tb_frame.f_globals.get("__name__", "").startswith("lenz."):
            tb = tb.tb_next
        self.args = (self.what,)  # Dynamo has added to it
        return self.with_traceback(tb or self.__traceback__)

    def reduced(self: LenzError) -> Any:  # another process gets lenz's own error, as text
        state = {k: v for k, v in self.__dict__.items() if isinstance(v, str)}
        return kind.__new__, (kind, self.what), state

    body = {"__reduce__": reduced, "remove_dynamo_frames": shortened}
    bases = (kind, exc.ShortenTraceback)
    return type(kind.__name__, bases, {"__module__": kind.__module__, **body})
