"""`python -m cluster.show`: see cluster/demos/show.py."""

from __future__ import annotations

import sys

from cluster.demos.show import main

if __name__ == "__main__":
    sys.exit(main())
