"""`cluster.train`, with the autoscaler's decisions taken from a script; else as `impatient`.

`SCRIPT` in the environment is a JSON list of sizes by pool; each entry holds until the pools are
what it says, the last until the end.
"""

import json
import os
import sys
from typing import Any

import cluster.runtime.scaling
from cluster.runtime.autoscale import Observation, Resize
from cluster.train import main
from tests.e2e.impatient import apply_numbers

SCRIPT = "ISOTHERM_TEST_SCALING"


class Scripted:
    """Scripted replacement of the autoscaler."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._script: list[dict[Any, int]] = json.loads(os.environ[SCRIPT])

    def observe(self, observation: Observation) -> list[Resize]:
        now = {pool: observation.ready[pool] for pool in self._script[0]}
        if now == self._script[0] and len(self._script) > 1:
            self._script.pop(0)
        return [
            Resize(pool, size, "")
            for pool, size in self._script[0].items()
            if size != observation.sizes[pool]
        ]


if __name__ == "__main__":
    apply_numbers()
    cluster.runtime.scaling.Autoscaler = Scripted  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(main())
