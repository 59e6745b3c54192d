"""Console of the commands."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console


def make_console() -> Console:
    """Wide enough never to wrap a log line; a terminal keeps its own width."""
    if sys.stdout.isatty():
        return Console()
    return Console(file=cast(IO[str], _Output()), width=200, soft_wrap=True)


class _Output:
    """sys.stdout, whose disk may be full for a while: what is printed then is lost, no more.

    The files in `out/` lose nothing: see cluster/jsonl_log.py.
    """

    def write(self, text: str) -> int:
        with _room_or_not():
            sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        with _room_or_not():
            sys.stdout.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


@contextmanager
def _room_or_not() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
