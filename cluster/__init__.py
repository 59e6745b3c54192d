"""Wiring: Ray actors made of the plain classes, queue, weights, supervision, the command line.

The only package that imports ray and wandb, and the only one that knows both actors and learner.
"""

import sys
from importlib.util import find_spec

# Plain words in place of a traceback for `python -m cluster.train` by another Python.
if sys.argv[:1] == ["-m"] and (sys.version_info < (3, 11) or find_spec("chz") is None):
    version = ".".join(map(str, sys.version_info[:2]))
    sys.exit(
        f"error: isotherm is not installed for {sys.executable} (Python {version}; it needs 3.11 "
        "or newer): run `make install`, then `. .venv/bin/activate`; or `pip install -e .` in an "
        "environment of your own"
    )
