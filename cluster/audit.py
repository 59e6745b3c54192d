"""`python -m cluster.audit`: see cluster/inspect/audit.py."""

from __future__ import annotations

import sys

from cluster.inspect.audit import main

if __name__ == "__main__":
    sys.exit(main())
