"""Makes tests/oracle.py and the modules beside this file importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
