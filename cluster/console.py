"""Console of the commands, whose write errors do not end a run.

While a disk is full, lines are lost. A closed pipe (`| head`), a lost terminal or a file that may
not grow is permanent. Standard output, and standard error if it is lost as well, are redirected to
/dev/null in the first two cases. The files in `out/` are not affected. `lost_output` returns the
reason to the run.
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
    errno.EFBIG: "the file of standard output has reached the limit on file sizes (ulimit -f)",
}

# Printed paths, tokens and model outputs must not be parsed: `[/INST]` is not markup, and
# `rows.jsonl:100:` not an emoji.
_AS_IT_IS: Any = {"markup": False, "emoji": False}


def make_console() -> Console:
    """Create a console of standard output. On a terminal it has the terminal's width."""
    output = cast(IO[str], _Output(sys.stdout))
    if sys.stdout.isatty():
        return Console(file=output, **_AS_IT_IS)
    return log_console(output)


def log_console(file: IO[str]) -> Console:
    """Create a console for a log, without line wrapping."""
    return Console(file=file, width=200, soft_wrap=True, **_AS_IT_IS)


def lost_output(console: Console) -> str | None:
    """Reason why the console's output is permanently lost; None if it is not."""
    return console.file.lost if isinstance(console.file, _Output) else None


def discard_lost_outputs() -> None:
    """Redirect standard output and standard error to /dev/null if their reader is gone.

    Later writes then succeed, also in libraries and at the interpreter's exit.
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
        lost: reason why the output is permanently lost; None if it is not.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.lost: str | None = None

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._on_write_error(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._on_write_error(error)

    def _on_write_error(self, error: OSError) -> None:
        if error.errno in _LOST:
            self.lost = self.lost or _LOST[error.errno]
            discard_lost_outputs()
        elif not is_full(error):
            raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
