"""Lets the tests of this folder import its `harness`, and the oracles of all rooms and of GPUs.

pytest's importlib mode adds no path.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE.parent / "ops", HERE.parent, HERE):
    sys.path.insert(0, str(folder))
