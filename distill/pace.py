"""Deadlines by work: the seconds that a number of tokens may take, by what was measured."""

from __future__ import annotations

# A sample of a busy server gets a token at least this often, retractions included.
SLOWEST_TOKEN_S = 0.25
# And this much of a prompt is computed in a second where many wait: 500 tokens.
SLOWEST_PREFILL_S = 0.002
# A request may take so many times as long for each token as the slowest lately did.
_MARGIN = 4.0
# How much of the slowest is left after each other request.
_MEMORY = 0.95


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
