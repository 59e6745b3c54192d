"""`python -m cluster.story`: see cluster/inspect/story.py."""

from __future__ import annotations

import sys

from cluster.inspect.story import main

if __name__ == "__main__":
    sys.exit(main())
