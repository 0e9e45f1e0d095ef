"""The capabilities of CPUs."""

from __future__ import annotations

import os
from pathlib import Path

from lenz.target import Capabilities

CAN = Capabilities(buffers=24, raises=True, paged=True)
_L3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # as "32768K"
_KIB = int("0" + "".join(filter(str.isdigit, _L3.read_text()))) if _L3.exists() else 0
# A result of so many bytes is evicted before the next kernel reads it: 4 MiB for each core, about
# its share of the last-level cache, or a quarter of that cache. Two cores of a processor with 480
# MiB of it add up f32 to results of 32 MB in 5.7 ms below this size, and in 9.7 above it.
LARGE = max((4 << 20) * max(os.cpu_count() or 1, 2), _KIB << 8)
