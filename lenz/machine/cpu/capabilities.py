"""The capabilities of CPUs."""

from __future__ import annotations

from lenz.target import Capabilities

CAN = Capabilities(buffers=24, raises=True, paged=True)
