"""`cluster.train` with other numbers for its supervision.

`NUMBERS` in the environment is JSON: constructor arguments of the classes in `PARTS`, by name.
"""

import json
import os
import sys

from cluster.runtime.scaling import Scaling
from cluster.runtime.watchdog import Watchdog
from cluster.supervision.supervise import Supervisor
from cluster.train import main

NUMBERS = "ISOTHERM_TEST_NUMBERS"
PARTS = Supervisor, Watchdog, Scaling


def apply_numbers() -> None:
    """Replace defaults of constructor arguments by those in the environment."""
    given: dict[str, float] = json.loads(os.environ.get(NUMBERS, "{}"))
    defaults = [part.__init__.__kwdefaults__ or {} for part in PARTS]
    for name, value in given.items():
        [one] = [each for each in defaults if name in each]
        one[name] = value


if __name__ == "__main__":
    apply_numbers()
    sys.exit(main())
