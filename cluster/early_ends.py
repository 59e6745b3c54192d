"""Exceptions that end a run before its last step; each becomes an exit code."""

from __future__ import annotations

import signal


class RunFailed(RuntimeError):
    """The run ended early. The message says which part failed and what to do."""


class Interrupted(Exception):
    """The user (SIGINT) or the scheduler (SIGTERM) asked the run to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum
