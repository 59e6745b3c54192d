"""Detection of an installed SGLang without importing it, and the Python path of its processes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from distill.errors import ConfigError

_REPOSITORY = Path(__file__).parents[2]
# Modules that SGLang's CPU engine imports but does not use. On the path of its processes only.
CPU_STANDINS = Path(__file__).parent / "cpu_standins"


def python_path() -> str:
    """PYTHONPATH of SGLang's processes, with stand-ins if `sgl_kernel` is not installed."""
    paths = [str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("sgl_kernel") is None:
        paths.append(str(CPU_STANDINS))
    return os.pathsep.join(filter(None, paths))


def sglang_installed() -> bool:
    """True if SGLang is installed; does not import SGLang."""
    return importlib.util.find_spec("sglang") is not None


def require_sglang() -> None:
    """Raise ConfigError, with the remedy, if SGLang is not installed."""
    if not sglang_installed():
        raise ConfigError(
            "engine=sglang but SGLang is not installed here; `pip install 'isotherm[sglang]'` on a "
            "CUDA machine, `make install-sglang` without one, or engine=embedded",
            field="engine.kind",
        )
