"""lenz: a compiler for PyTorch programs, behind torch.compile(model, backend="lenz").

The compiler is imported only when it is used: the runtime works without it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenz.api import FxBackend, backend
    from lenz.artifact.export import export, standalone_compile
    from lenz.artifact.loaded import CompiledArtifact, load
    from lenz.debug.counters import counters
    from lenz.explaining import explain, profile
    from lenz.version import __version__

__all__ = [
    "CompiledArtifact",
    "FxBackend",
    "__version__",
    "backend",
    "counters",
    "explain",
    "export",
    "load",
    "profile",
    "standalone_compile",
]

STARTED = time.time()  # before any other file of lenz is read


# The module of each public name, so that a process only imports the ones it uses.
PLACES = {
    "__version__": "lenz.version",
    "CompiledArtifact": "lenz.artifact.loaded",
    "counters": "lenz.debug.counters",
    "load": "lenz.artifact.loaded",
    "explain": "lenz.explaining",
    "export": "lenz.artifact.export",
    "profile": "lenz.explaining",
    "standalone_compile": "lenz.artifact.export",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        import gc
        import importlib

        was_on = gc.isenabled()
        gc.disable()  # imports make it walk through all objects of torch: 0.1 s
        try:
            return getattr(importlib.import_module(PLACES.get(name, "lenz.api")), name)
        finally:
            if was_on:
                gc.enable()
    raise AttributeError(f"module 'lenz' has no attribute {name!r}")
