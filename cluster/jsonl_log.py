"""JSON files, and JSON lines files to which a run appends complete lines.

A killed process loses no line that it has appended. If the disk is full, lines are kept in memory
until the next append, and the run continues.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from distill.durable_files import disk_remedy, whole_write
from distill.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16


class LineFile:
    """File to which lines are appended without buffering. Opened at the first append.

    Pickled as its path.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        self._size = 0
        self._waiting = bytearray()
        self._warned = False

    def __reduce__(self) -> tuple[type[LineFile], tuple[Path]]:
        return LineFile, (self.path,)

    def append(self, line: bytes, *, later: bool = False) -> None:
        """Append a line.

        Args:
            line: content without the newline.
            later: write the line at the next flush.
        """
        self._waiting += line + b"\n"
        if not later:
            self.flush()

    def flush(self) -> None:
        """Write the waiting lines, as many as fit on the disk."""
        if not self._waiting:
            return
        try:
            descriptor = self._open()
            written = os.write(descriptor, self._waiting)
            whole = self._waiting.rfind(b"\n", 0, written) + 1
            del self._waiting[:whole]
            self._size += whole
            if whole < written:  # a part of a line
                os.ftruncate(descriptor, self._size)
        except OSError as error:
            self._warn_once(error)
            return
        if self._waiting:
            self._warn_once(f"it was written in part: {os.strerror(errno.ENOSPC)}")
        else:
            self._warned = False

    def sync(self) -> None:
        """Flush and sync to disk, so that written lines survive a crash of the machine."""
        self.flush()
        try:
            os.fsync(self._open())
        except OSError as error:
            self._warn_once(error)

    def close(self) -> None:
        """Write the waiting lines and close the file. The next append opens the file again."""
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        """Open the file if necessary, and truncate it after the last complete line."""
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)
            size = os.fstat(self._descriptor).st_size
            self._size = _end_of_last_line(self._descriptor, size)
            if self._size < size:
                os.ftruncate(self._descriptor, self._size)
        return self._descriptor

    def _warn_once(self, error: OSError | str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s cannot be written (%s): its lines are kept in memory. %s",
                self.path,
                error,
                disk_remedy(error),
            )


def last_line(path: Path) -> bytes:
    """Last complete line of a file, without its newline; b"" if there is none."""
    if not path.is_file():
        return b""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = _end_of_last_line(descriptor, os.fstat(descriptor).st_size)
        start = _end_of_last_line(descriptor, max(0, end - 1))
        return os.pread(descriptor, end - start, start).removesuffix(b"\n")
    finally:
        os.close(descriptor)


def _end_of_last_line(descriptor: int, size: int) -> int:
    end = size
    while end:
        start = max(0, end - _CHUNK)
        if (found := os.pread(descriptor, end - start, start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def read_lines(path: Path, required: Set[str]) -> list[dict[str, Any]]:
    """Read the objects of a file; empty without a file. An incomplete last line is left out.

    Raises:
        DataError: a line is not an object with the `required` fields; the message names the line.
    """
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and isinstance(error, ValueError):
                break
            raise DataError(f"{path}:{number} is not JSON ({error}); remove the line") from error
        if not isinstance(row, dict) or not required <= row.keys():
            raise DataError(
                f"{path}:{number} is not an object with {' and '.join(sorted(required))}; remove "
                "the line"
            )
        found.append(row)
    return found


def read_object(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in a file; None without a file.

    Raises:
        DataError: the file cannot be read, or does not contain an object.
    """
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove the file") from error
    if found is not None and not isinstance(found, dict):
        raise DataError(f"{path} is not a JSON object; remove the file")
    return found


def step_of(line: bytes | str) -> float:
    """Step of a line; infinity for a line that a crash has cut, so that it counts as later."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")


def write_rows(setting: str, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to the file that `setting` names, one row per line, atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    _write(setting, path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_json(setting: str, path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object to the file that `setting` names, atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    _write(setting, path, [json.dumps(value, indent=1) + "\n"])


def _write(setting: str, path: Path, texts: Iterable[str]) -> None:
    try:
        # UTF-8 cannot encode an unpaired surrogate, which is written as a JSON escape.
        with (
            whole_write(path) as partial,
            partial.open("w", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.writelines(texts)
    except OSError as error:
        raise ConfigError(f"{setting}={path} cannot be written: {error}") from error
