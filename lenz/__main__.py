"""`python -m lenz`."""

import sys

from lenz.cli import main

if __name__ == "__main__":
    sys.exit(main())
