"""`python -m cluster.demo`: see cluster/demos/demo.py."""

from __future__ import annotations

import sys

from cluster.demos.demo import main

if __name__ == "__main__":
    sys.exit(main())
