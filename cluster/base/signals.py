"""Handlers of the signals that end a command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from cluster.base.outcomes import Ended


@contextmanager
def handled(
    handler: Callable[[int, FrameType | None], object], *signals: signal.Signals
) -> Iterator[None]:
    """Context with a handler of these signals, in the main thread; elsewhere it does nothing.

    A SIGHUP that the process was started to ignore (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python sets handlers in the main thread only
        return
    previous = {
        signum: signal.signal(signum, handler)
        for signum in signals
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


@contextmanager
def handler_kept() -> Iterator[None]:
    """Context of `ray.init`, which sets a handler of SIGTERM that exits with 15 and no message."""
    try:
        with handled(end, signal.SIGTERM):  # restores the handler on exit
            yield
    except SystemExit as exited:  # raised by Ray's handler
        raise Ended(signal.SIGTERM) from exited


def end(signum: int, _frame: FrameType | None) -> None:
    """Handler that ends the command with the signal's exit code, as SIGINT does in Python."""
    raise Ended(signum)
