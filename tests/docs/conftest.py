"""Lets the tests of this folder import `blocks`: pytest's importlib mode adds no path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
