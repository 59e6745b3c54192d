"""Optional libraries: features import them where they use them, and a run checks for them first."""

from __future__ import annotations

import shlex
from importlib.util import find_spec

from distill.errors import ConfigError

# Kernels that transformers uses for linear attention if they are installed.
LINEAR_ATTENTION_INSTALL = "pip install 'isotherm[linear-attention]'"


def has_linear_attention_kernels() -> bool:
    """True if the kernels are installed; otherwise transformers runs reference code in torch."""
    return find_spec("fla") is not None


def require_library(module: str, feature: str, install: str, field: str | None = None) -> None:
    """Raise ConfigError unless `module` is installed.

    Args:
        feature: name of the feature that needs it, for the message.
        install: argument of `pip install`.
        field: setting that enables the feature, if known.
    """
    if find_spec(module) is None:
        raise ConfigError(
            f"{feature} needs the library {module}, which is not installed: "
            f"pip install {shlex.quote(install)}",
            field=field,
        )
