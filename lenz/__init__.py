"""lenz: a compiler for PyTorch programs, behind torch.compile(model, backend="lenz").

The compiler is imported only when it is used: the runtime works without it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenz.api import FxBackend, backend, explain

__all__ = ["FxBackend", "backend", "explain"]

STARTED = time.time()  # before any other file of lenz is read


def __getattr__(name: str) -> Any:
    if name in __all__:
        import lenz.api

        return getattr(lenz.api, name)
    raise AttributeError(f"module 'lenz' has no attribute {name!r}")
