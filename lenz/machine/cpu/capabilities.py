"""The capabilities of CPUs."""

from __future__ import annotations

import os

from lenz.target import Capabilities

CAN = Capabilities(buffers=24, raises=True, paged=True)
# A result of so many bytes is evicted before the next kernel reads it: 4 MiB for each core, about
# its share of the last-level cache.
LARGE = (4 << 20) * max(os.cpu_count() or 1, 2)
