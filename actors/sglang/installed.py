"""Is SGLang here, and what it needs besides? Asked without an import of it."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from distill.errors import ConfigError

_REPOSITORY = Path(__file__).parents[2]
# Import-only modules that SGLang's CPU engine wants; only processes of SGLang see them.
CPU_STANDINS = Path(__file__).parent / "cpu_standins"


def python_path() -> str:
    """PYTHONPATH of SGLang's processes: this project and, without its kernels, the stand-ins."""
    paths = [str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("sgl_kernel") is None:
        paths.append(str(CPU_STANDINS))
    return os.pathsep.join(filter(None, paths))


def sglang_installed() -> bool:
    """True if SGLang can be imported here; does not import it."""
    return importlib.util.find_spec("sglang") is not None


def require_sglang() -> None:
    """Raises ConfigError, with the remedy, where SGLang is not installed."""
    if not sglang_installed():
        raise ConfigError(
            "engine=sglang but SGLang is not installed here; `pip install 'isotherm[sglang]'` on a "
            "CUDA machine, `make install-sglang` without one, or engine=embedded",
            field="engine.kind",
        )


def knows_flag(name: str) -> bool:
    """True if SGLang is here and declares the command-line flag; read in its source."""
    field = name.removeprefix("--").replace("-", "_")
    return _declares(field, "server_args.py", "arg_groups/fields/*.py")


def checks_adapters() -> bool:
    """True if SGLang is here and compares an adapter's checksums; read in its source."""
    return _declares("expected_checksums", "managers/io_struct.py")


def _declares(field: str, *files: str) -> bool:
    spec = importlib.util.find_spec("sglang")
    return any(
        re.search(rf"^\s+{field}\s*:", file.read_text(), re.MULTILINE)
        for root in (spec and spec.submodule_search_locations) or ()
        for pattern in files
        for file in (Path(root) / "srt").glob(pattern)
    )
