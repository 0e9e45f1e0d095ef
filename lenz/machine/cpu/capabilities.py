"""The numbers of CPUs that rooms of the compiler ask for."""

from __future__ import annotations

from lenz.target import Capabilities

CAN = Capabilities(buffers=24, raises=True, paged=True)
