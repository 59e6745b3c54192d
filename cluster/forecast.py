"""`python -m cluster.forecast`: see cluster/inspect/forecast/command.py."""

from __future__ import annotations

import sys

from cluster.inspect.forecast.command import main

if __name__ == "__main__":
    sys.exit(main())
