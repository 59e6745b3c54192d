"""Paths in the upload of a submitted job, which is the directory that `--working-dir` packs.

Ray unpacks the upload into a directory of its session on the node. It removes that directory with
the session, or when its cache of uploads is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from distill.errors import ConfigError

# Directory into which Ray unpacks uploads (ray._private.runtime_env.working_dir).
_UPLOADS = ("runtime_resources", "working_dir_files")
# Suffixes of files in settings, which distinguish paths from names on a hub.
_FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt", ".jinja", ".yaml", ".toml")


def in_upload(path: str | Path) -> bool:
    """True if a path is in the unpacked upload of a job."""
    parts = Path(path).resolve().parts
    return any(parts[i : i + 2] == _UPLOADS for i in range(len(parts) - 2))


def refuse_upload(setting: str, path: str | Path) -> None:
    """Raise ConfigError for an output path in the upload, which Ray removes."""
    if in_upload(path):
        raise ConfigError(
            f"{setting}={path} is in the upload of this job ({Path(path).resolve()}), which Ray "
            f"removes: give {setting}= an absolute path on shared storage"
        )


def missing_from_upload(settings: Mapping[str, str]) -> str | None:
    """Message about relative paths that are not in the job's upload; None without such paths."""
    if not in_upload("."):
        return None
    missing = [
        f"{name}={path}"
        for name, value in settings.items()
        for path in map(str.strip, value.split(","))
        if path.endswith(_FILES) and not Path(path).is_absolute() and not Path(path).exists()
    ]
    if not missing:
        return None
    return (
        f"not in the job's upload: {', '.join(missing)}. Relative paths are resolved in "
        f"{Path.cwd()}, and the upload leaves out files that .gitignore or .rayignore names; "
        "give absolute paths on shared storage"
    )
