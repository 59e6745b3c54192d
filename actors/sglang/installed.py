"""Detection of an installed SGLang without importing it, and the Python path of its processes."""

from __future__ import annotations

import importlib.util
import os
import re
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


def declares_flag(name: str) -> bool:
    """True if the installed SGLang declares a command-line flag, according to its source."""
    field = name.removeprefix("--").replace("-", "_")
    return _declares(field, "server_args.py", "arg_groups/fields/*.py")


def checks_adapters() -> bool:
    """True if the installed SGLang verifies checksums of adapters, according to its source."""
    return _declares("expected_checksums", "managers/io_struct.py")


def _declares(field: str, *files: str) -> bool:
    spec = importlib.util.find_spec("sglang")
    return any(
        re.search(rf"^\s+{field}\s*:", file.read_text(), re.MULTILINE)
        for root in (spec and spec.submodule_search_locations) or ()
        for pattern in files
        for file in (Path(root) / "srt").glob(pattern)
    )
