"""Libraries that only some features need: imported where they are used, checked before a run."""

from __future__ import annotations

import shlex
from importlib.util import find_spec

from distill.errors import ConfigError


def require_library(module: str, feature: str, install: str) -> None:
    """Raises ConfigError unless `module` is installed.

    Args:
        feature: the setting that needs it.
        install: what pip installs it by.
    """
    if find_spec(module) is None:
        raise ConfigError(
            f"{feature} needs the library {module}, which is not installed: "
            f"pip install {shlex.quote(install)}"
        )
