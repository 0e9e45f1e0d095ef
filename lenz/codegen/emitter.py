"""What every code generator offers: kernels in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lenz.ir.kernel import Kernel
from lenz.target import Target


class Emitter(Protocol):
    """Equal kernels and equal targets give equal text; no choice of profit is made here."""

    def __call__(self, kernels: Sequence[Kernel], target: Target) -> str:
        """Give the text of one module that defines every kernel under its own name."""
