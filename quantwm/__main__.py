"""`python -m quantwm`: hands over to the command line."""

from __future__ import annotations

import sys

from quantwm.cli import main

if __name__ == "__main__":
    sys.exit(main())
