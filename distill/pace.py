"""Deadlines that depend on the amount of work, and the counter by which a watcher sees progress."""

from __future__ import annotations

# Longest time per token of a sample on a busy server, retractions included.
SLOWEST_TOKEN_S = 0.25
# Longest time per prompt token while many requests are queued: 500 tokens per second.
SLOWEST_PREFILL_S = 0.002
# Bytes per second read from a slow shared disk.
LOADED_A_S = 100_000_000
# Bytes per second downloaded from the hub over a slow line.
DOWNLOADED_A_S = 10_000_000
# Allowed time per token of a request, as a multiple of that of the slowest recent request.
_MARGIN = 4.0
# Decay of the slowest measured time with each further request.
_MEMORY = 0.95


def loading_s(nbytes: int) -> float:
    """Upper estimate of the seconds to load `nbytes` of weights into an engine or a learner."""
    return nbytes / LOADED_A_S


def downloading_s(nbytes: int) -> float:
    """Upper estimate of the seconds to download `nbytes` of a model from a hub."""
    return nbytes / DOWNLOADED_A_S


class Pace:
    """Seconds per token of the slowest of the latest requests.

    Args:
        slowest_s: seconds per token that are always allowed.
    """

    def __init__(self, slowest_s: float) -> None:
        self._granted_s, self._measured_s = slowest_s, 0.0

    def note(self, seconds: float, tokens: int) -> None:
        """Record the duration of a request, including the time that it was queued."""
        if tokens > 0:
            self._measured_s = max(seconds / tokens, self._measured_s * _MEMORY)

    def allowance_s(self, tokens: int) -> float:
        """Seconds that `tokens` tokens may take one after the other."""
        return tokens * max(self._granted_s, _MARGIN * self._measured_s)


class Progress:
    """Monotonic counter of completed work. A watcher treats an unchanged value as a hang."""

    def __init__(self) -> None:
        self.count = 0

    def mark(self) -> None:
        """Count a completed piece of work, or the continuation of a wait with its own deadline."""
        self.count += 1
