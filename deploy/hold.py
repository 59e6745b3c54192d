"""Constraints for pip in an environment that others have made: what is there stays as it is.

    python deploy/hold.py constraints-cuda.txt > held.txt

Prints the version of every package that is installed, and the file's lines for the others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path


def held(installed: Mapping[str, str], pins: str) -> list[str]:
    """Constraints.

    Args:
        installed: versions by name.
        pins: lines of `name==version`, and comments.
    """
    here = {_canonical(name) for name in installed}
    others = [line for line in pins.splitlines() if "==" in line and not line.startswith("#")]
    return [
        *(f"{name}=={version}" for name, version in sorted(installed.items())),
        *(line for line in others if _canonical(line.split("==")[0]) not in here),
    ]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


if __name__ == "__main__":
    found = {
        each.metadata["Name"]: each.version for each in distributions() if each.metadata["Name"]
    }
    print("\n".join(held(found, Path(sys.argv[1]).read_text())))
