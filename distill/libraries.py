"""Libraries that only some features need: imported where they are used, checked before a run."""

from __future__ import annotations

import shlex
from importlib.util import find_spec

from distill.errors import ConfigError

# Kernels that transformers uses for linear attention where they are installed.
LINEAR_ATTENTION_INSTALL = "pip install 'isotherm[linear-attention]'"


def has_linear_attention_kernels() -> bool:
    """True if this machine has them: without, transformers runs reference code of plain torch."""
    return find_spec("fla") is not None


def require_library(module: str, feature: str, install: str, field: str | None = None) -> None:
    """Raises ConfigError unless `module` is installed.

    Args:
        feature: what needs it, for people.
        install: what pip installs it by.
        field: the setting that asks for it, if it is known.
    """
    if find_spec(module) is None:
        raise ConfigError(
            f"{feature} needs the library {module}, which is not installed: "
            f"pip install {shlex.quote(install)}",
            field=field,
        )
