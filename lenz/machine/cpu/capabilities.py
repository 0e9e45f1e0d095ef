"""The capabilities of CPUs."""

from __future__ import annotations

import os

from lenz.target import Capabilities

CAN = Capabilities(buffers=24, raises=True, paged=True)
# Bytes of a result that leaves the caches before the next kernel reads it: about a core's share of
# the last level, 4 MiB, for every core.
LARGE = (4 << 20) * max(os.cpu_count() or 1, 2)
