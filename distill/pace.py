"""Deadlines by work: the seconds that a number of tokens may take, by what was measured; and the
count of work by which others see that a part gets on."""

from __future__ import annotations

# A sample of a busy server gets a token at least this often, retractions included.
SLOWEST_TOKEN_S = 0.25
# And this much of a prompt is computed in a second where many wait: 500 tokens.
SLOWEST_PREFILL_S = 0.002
# So many bytes a second are read from a slow shared disk.
LOADED_A_S = 100_000_000
# And so many come from the hub over a slow line.
DOWNLOADED_A_S = 10_000_000
# A request may take so many times as long for each token as the slowest lately did.
_MARGIN = 4.0
# How much of the slowest is left after each other request.
_MEMORY = 0.95


def loading_s(nbytes: int) -> float:
    """What so many bytes of weights may take on their way into an engine or a learner."""
    return nbytes / LOADED_A_S


def downloading_s(nbytes: int) -> float:
    """What so many bytes of a model may take on their way from a hub."""
    return nbytes / DOWNLOADED_A_S


class Pace:
    """Seconds a token, of the slowest of the latest requests.

    Args:
        slowest_s: seconds a token that are always granted.
    """

    def __init__(self, slowest_s: float) -> None:
        self._granted_s, self._measured_s = slowest_s, 0.0

    def note(self, seconds: float, tokens: int) -> None:
        """A request took so long, the time that it waited for others included."""
        if tokens > 0:
            self._measured_s = max(seconds / tokens, self._measured_s * _MEMORY)

    def allowance_s(self, tokens: int) -> float:
        """What so many tokens, one after the other, may take."""
        return tokens * max(self._granted_s, _MARGIN * self._measured_s)


class Progress:
    """Count of work done. Whoever looks at it again and finds it moved lets its owner be."""

    def __init__(self) -> None:
        self.count = 0

    def mark(self) -> None:
        """A piece of work is done, or a wait under a deadline of its own goes on."""
        self.count += 1
