"""Python environment that has only chz and the packages that torch, transformers and peft require.

GPU machines without a network often have only these: no Ray, no SGLang, and none of the other
libraries that isotherm installs.
"""

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
_INSTALLED = ("chz", "torch", "transformers", "peft", "accelerate")


def bare_environment(directory: Path) -> dict[str, str]:
    """Environment variables for `python -S` that expose this source tree and those packages only.

    Args:
        directory: filled with links to the packages.
    """
    for name in _needed():
        package = distribution(name)
        files = (package.read_text("RECORD") or "").splitlines()
        for top in {file.partition(",")[0].partition("/")[0] for file in files} - {"..", ""}:
            link = directory / top
            if not link.exists():
                link.symlink_to(str(package.locate_file(top)))
    return os.environ | {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}


def _needed() -> set[str]:
    """Names of the packages and of their installed requirements."""
    found, ahead = set[str](), list(_INSTALLED)
    while ahead:
        name = ahead.pop()
        if name in found:
            continue
        try:
            required = distribution(name).requires or ()
        except PackageNotFoundError:  # for another platform
            continue
        found.add(name)
        wanted = [Requirement(line) for line in required]
        ahead += [each.name for each in wanted if not each.marker or each.marker.evaluate()]
    return found
