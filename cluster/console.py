"""Console of the commands. Output that cannot be written does not end a run.

A full disk loses lines and recovers. A closed pipe (`| head`) or a lost terminal is final: standard
output, and standard error if it is lost as well, then go to /dev/null. The files in `out/` are not
affected; `lost_output` tells a run why nothing is printed any more.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from typing import IO, Any, cast

from rich.console import Console

from distill.durable_files import is_full

_LOST = {
    errno.EPIPE: "the pipe of standard output was closed",
    errno.EIO: "the terminal was closed",
}

# A path, a token or a model's words: `[/INST]` is no markup there, and `rows.jsonl:100:` no emoji.
_AS_IT_IS: Any = {"markup": False, "emoji": False}


def make_console() -> Console:
    """Console of standard output; a terminal keeps its own width."""
    output = cast(IO[str], _Output(sys.stdout))
    if sys.stdout.isatty():
        return Console(file=output, **_AS_IT_IS)
    return log_console(output)


def log_console(file: IO[str]) -> Console:
    """Console of a log, wide enough never to wrap a line."""
    return Console(file=file, width=200, soft_wrap=True, **_AS_IT_IS)


def lost_output(console: Console) -> str | None:
    """Reason why the console's output is lost for good, or None while it is written."""
    return console.file.lost if isinstance(console.file, _Output) else None


def discard_lost_outputs() -> None:
    """Redirect standard output and standard error to /dev/null where nobody reads them any more.

    Later writes, also those of libraries and of the interpreter's exit, then succeed.
    """
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, select.POLLOUT)
    for descriptor, event in poll.poll(0):
        if event & (select.POLLERR | select.POLLHUP):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)


class _Output:
    """Standard output that survives a full disk, a closed pipe and a lost terminal.

    Attributes:
        lost: why it is lost for good; None while it is written.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.lost: str | None = None

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._survive(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._survive(error)

    def _survive(self, error: OSError) -> None:
        if error.errno in _LOST:
            self.lost = self.lost or _LOST[error.errno]
            discard_lost_outputs()
        elif not is_full(error):
            raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
