"""Waiting for what another process, thread or actor does."""

import time
from collections.abc import Callable

DEADLINE_S = 300.0


def until(true: Callable[[], object], *, within_s: float = DEADLINE_S, failing: str = "") -> None:
    """Waits for a condition; raises AssertionError when it has not come true after `within_s`.

    The deadline is against hangs alone: far longer than the slowest machine needs.
    """
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, failing or "the condition never came true"
        time.sleep(0.02)
