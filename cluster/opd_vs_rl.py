"""`python -m cluster.opd_vs_rl`: see cluster/demos/opd_vs_rl.py."""

from __future__ import annotations

import sys

from cluster.demos.opd_vs_rl import main

if __name__ == "__main__":
    sys.exit(main())
