"""`isotherm COMMAND key=value ...`, and `python -m isotherm`."""

from __future__ import annotations

import os
import sys

from isotherm.shadowing import check_packages


def main() -> int:
    """Run the command, and return its exit code."""
    try:
        return _run()
    except KeyboardInterrupt:  # during imports; later the command prints this error itself
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
    """Put the working directory first on `sys.path`, as `python -m` does, for `reward=my_file:f`.

    Ray's workers get the path from the driver.
    """
    here = os.getcwd()
    if not sys.flags.safe_path and not {"", here} & set(sys.path):
        sys.path.insert(0, here)


if __name__ == "__main__":
    sys.exit(main())
