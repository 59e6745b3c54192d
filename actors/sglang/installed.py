"""Is SGLang here? Asked without an import of it."""

from __future__ import annotations

import importlib.util

from distill.errors import ConfigError


def sglang_installed() -> bool:
    """True if SGLang can be imported here; does not import it."""
    return importlib.util.find_spec("sglang") is not None


def require_sglang() -> None:
    """Raises ConfigError, with the remedy, where SGLang is not installed."""
    if not sglang_installed():
        raise ConfigError(
            "engine=sglang but SGLang is not installed here; `pip install 'isotherm[sglang]'` on a "
            "CUDA machine, `make install-sglang` without one, or engine=embedded"
        )
