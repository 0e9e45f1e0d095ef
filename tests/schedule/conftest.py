"""Lets the tests of this folder import the oracle for GPUs, and the harness that traces."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "lower")]
