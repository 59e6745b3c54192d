"""Ray actors made of the plain classes, queue, weight pushes, supervision, and the command line.

Only this package imports ray and wandb, and both `actors` and `learner`.
"""

import sys
from importlib.util import find_spec

# A readable error instead of a traceback for `python -m cluster.train` with another Python.
if sys.argv[:1] == ["-m"] and (sys.version_info < (3, 11) or find_spec("chz") is None):
    version = ".".join(map(str, sys.version_info[:2]))
    sys.exit(
        f"error: isotherm is not installed for {sys.executable} (Python {version}; it needs 3.11 "
        "or newer): run `make install`, then `. .venv/bin/activate`; or `pip install -e .` in "
        "your own environment"
    )
