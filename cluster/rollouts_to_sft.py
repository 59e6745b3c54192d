"""`python -m cluster.rollouts_to_sft`: see cluster/inspect/rollouts_to_sft.py."""

from __future__ import annotations

import sys

from cluster.inspect.rollouts_to_sft import main

if __name__ == "__main__":
    sys.exit(main())
