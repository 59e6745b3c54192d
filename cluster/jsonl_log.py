"""Files of JSON, and of JSON lines that grow while a run goes on, whole line by whole line.

A process that is killed loses no line that it appended. On a disk that takes no more, lines wait in
memory for the next append; the run goes on.
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
    """Appends lines to a file, unbuffered. Opened by the first; pickles as its path."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        self._size = 0
        self._waiting = bytearray()
        self._complained = False

    def __reduce__(self) -> tuple[type[LineFile], tuple[Path]]:
        return LineFile, (self.path,)

    def append(self, line: bytes, *, later: bool = False) -> None:
        """`line` without the newline; `later` leaves it to the next flush."""
        self._waiting += line + b"\n"
        if not later:
            self.flush()

    def flush(self) -> None:
        """Writes what waits, as far as the disk takes it."""
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
            self._complain(error)
            return
        if self._waiting:
            self._complain(f"it took a part: {os.strerror(errno.ENOSPC)}")
        else:
            self._complained = False

    def sync(self) -> None:
        """Flushes and syncs to disk: what was written survives a crash of the machine."""
        self.flush()
        try:
            os.fsync(self._open())
        except OSError as error:
            self._complain(error)

    def close(self) -> None:
        """Writes what waits; the next append opens the file again."""
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        """The descriptor, at the end of the last whole line: one that was cut short is cut off."""
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)
            size = os.fstat(self._descriptor).st_size
            self._size = _end_of_last_line(self._descriptor, size)
            if self._size < size:
                os.ftruncate(self._descriptor, self._size)
        return self._descriptor

    def _complain(self, error: OSError | str) -> None:
        if not self._complained:
            self._complained = True
            logger.warning(
                "%s cannot be written (%s): its lines wait in memory. %s",
                self.path,
                error,
                disk_remedy(error),
            )


def last_line(path: Path) -> bytes:
    """The last whole line, without its newline; b"" where there is none."""
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
    """The file's objects; none without a file. A last line still being written is left out.

    Raises:
        DataError: names the line that is no object with the `required` fields.
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
            raise DataError(f"{path}:{number} is no JSON ({error}); remove the line") from error
        if not isinstance(row, dict) or not required <= row.keys():
            raise DataError(
                f"{path}:{number} is no object with {' and '.join(sorted(required))}; "
                "remove the line"
            )
        found.append(row)
    return found


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None without a file.

    Raises:
        DataError: it cannot be read, or is no object.
    """
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove the file") from error
    if found is not None and not isinstance(found, dict):
        raise DataError(f"{path} is no JSON object; remove the file")
    return found


def step_of(line: bytes | str) -> float:
    """Step of a line; infinity for one that a crash cut short, so that it counts as later."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")


def write_rows(setting: str, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the file that `setting` names, a row a line; whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    _write(setting, path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_json(setting: str, path: Path, value: Mapping[str, Any]) -> None:
    """Writes the file that `setting` names, as one JSON object; whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    _write(setting, path, [json.dumps(value, indent=1) + "\n"])


def _write(setting: str, path: Path, texts: Iterable[str]) -> None:
    try:
        # Half a surrogate pair, which UTF-8 cannot hold, stays the escape that JSON has for it.
        with (
            whole_write(path) as partial,
            partial.open("w", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.writelines(texts)
    except OSError as error:
        raise ConfigError(f"{setting}={path} cannot be written: {error}", field=setting) from error
