"""What users call: the torch.compile backend. `explain` stands in debug/report.py's terms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from lenz.debug.trace import Recorder
from lenz.errors import InternalError, LenzError, Unsupported, UserError
from lenz.frontend import FxProgram, capture
from lenz.lower import native_ops
from lenz.options import Options
from lenz.pipeline import Boxed, Compiled, compile_program, context

Seen = Callable[[Compiled, Recorder], Boxed]
MODES: Mapping[str, Mapping[str, object]] = {"default": {}}


def backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph; this is what `torch.compile(fn, backend="lenz")` calls.

    Raises UserError for an unknown mode or option.
    """
    if mode is not None and mode not in MODES:
        raise UserError(f"unknown mode {mode!r}", hint=f"modes are {', '.join(MODES)}")
    chosen = Options.from_environment({**MODES.get(mode or "default", {}), **(options or {})})
    return compile_graph(gm, example_inputs, chosen)


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    seen: Seen | None = None,
) -> Callable[..., Any]:
    """The backend with its options made; `seen` is shown each compiled graph and may wrap it."""

    def compile_fx(program: FxProgram) -> Boxed:
        folder = Path(options.debug_dir) / program.name if options.debug else None
        recorder = Recorder(program.name, options.logs, folder)
        cx = context(options, recorder)
        try:
            made = compile_program(program, cx)
            recorder.finish()
            return made.call if seen is None else seen(made, recorder)
        except Unsupported as e:
            warnings.warn(f"lenz runs {program.name} in eager: {e}", stacklevel=2)
            return program.interpret
        except UserError:
            raise
        except Exception as e:
            if options.on_error == "eager":
                warnings.warn(f"lenz failed on {program.name} and runs it in eager: {e}", stacklevel=2)
                return program.interpret
            if isinstance(e, LenzError):
                raise
            raise InternalError(f"{type(e).__name__}: {e}", pass_name=program.name) from e

    return capture(gm, example_inputs, compile_fx, options, native_ops())


__all__ = ["backend", "compile_graph"]
