"""`isotherm COMMAND key=value ...`, and `python -m isotherm`."""

from __future__ import annotations

import os
import sys

from isotherm.shadowing import check_packages


def main() -> int:
    """Returns the exit code."""
    try:
        return _run()
    except KeyboardInterrupt:  # while modules are imported; later the command says it itself
        print("error: interrupted (SIGINT)", file=sys.stderr)
        return 130


def _run() -> int:
    _find_modules_here()
    try:
        check_packages()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from cluster.cli import main as command

    return command()


def _find_modules_here() -> None:
    """Puts the working directory first on the path, as `python -m` does: `reward=my_file:f`.

    Ray's workers get it from the driver.
    """
    here = os.getcwd()
    if not sys.flags.safe_path and not {"", here} & set(sys.path):
        sys.path.insert(0, here)


if __name__ == "__main__":
    sys.exit(main())
