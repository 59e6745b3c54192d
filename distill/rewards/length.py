"""What the length of a response does to its reward: a penalty near the limit, no reward beyond."""

from __future__ import annotations

from dataclasses import dataclass

from distill.types import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRules:
    """Rules for the rewards of samples, by how long they are and whether they were cut off.

    Attributes:
        max_new_tokens: of a turn.
        mask_truncated: rewards of episodes that ended by length do not count.
        overlong_buffer: tokens before `max_new_tokens` within which the penalty grows; 0: none.
        overlong_penalty: what the longest turn loses.
    """

    max_new_tokens: int
    mask_truncated: bool = False
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0

    def counts(self, stop_reason: StopReason) -> bool:
        """False if the reward of an episode that ended so says nothing."""
        return not (self.mask_truncated and stop_reason is StopReason.LENGTH)

    def penalty(self, length: int) -> float:
        """What a turn of so many tokens loses: 0 up to the buffer, growing linearly through it.

        DAPO's soft overlong punishment (Yu et al. 2025, equation 13), negated.
        """
        if not self.overlong_buffer:
            return 0.0
        over = length - (self.max_new_tokens - self.overlong_buffer)
        return self.overlong_penalty * min(max(over, 0) / self.overlong_buffer, 1.0)
