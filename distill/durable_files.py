"""Files and directories that appear whole or not at all, whoever dies while they are written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_write(path: Path) -> Iterator[Path]:
    """Path to write a file or a directory to; at the block's end it replaces `path`.

    A block that raises leaves `path` as it was. What must survive a power failure is synced by the
    caller, before the end of the block and, for the name, after it.

    Raises:
        OSError: the written file or directory cannot take its name.
    """
    partial = path.with_name(f".{path.name}.partial")
    _remove(partial)  # left by a process that was killed
    try:
        yield partial
        if partial.is_dir():
            _remove(path)  # a directory replaces an empty one only
        partial.replace(path)
    except BaseException:
        _remove(partial)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
