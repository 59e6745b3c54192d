"""`python -m cluster.report`: see cluster/inspect/report/command.py."""

from __future__ import annotations

import sys

from cluster.inspect.report.command import main

if __name__ == "__main__":
    sys.exit(main())
