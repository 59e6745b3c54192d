"""Wait for another process, thread or actor."""

import time
from collections.abc import Callable

# Against hangs only: no test asserts how long anything takes. Whole runs wait on it, and starts of
# SGLang servers, for which the product allows 600 s: on a slow machine these take minutes.
DEADLINE_S = 900.0


def until(true: Callable[[], object], *, failing: str = "the condition never came true") -> None:
    """Waits for a condition; raises AssertionError when it has not come true in DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, failing
        time.sleep(0.02)
