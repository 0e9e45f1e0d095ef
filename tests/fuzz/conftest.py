"""Lets the tests of this folder import the harnesses of others."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE.parent / "ops", HERE.parent / "lower", HERE.parent, HERE.parent / "codegen"):
    sys.path.insert(0, str(folder))
