"""Effect of a response's length on its reward: a penalty near the limit; truncated ones ignored."""

from __future__ import annotations

from dataclasses import dataclass

from distill.objective.settings import ObjectiveConfig
from distill.types import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRules:
    """Rules for the rewards of samples, by length and truncation.

    Attributes:
        max_new_tokens: maximum number of tokens in a turn.
        mask_truncated: if True, rewards of episodes that ended by length do not count.
        overlong_buffer: number of tokens before `max_new_tokens` over which the penalty grows; 0:
            no penalty.
    """

    max_new_tokens: int
    mask_truncated: bool = False
    overlong_buffer: int = 0

    @classmethod
    def of(cls, objective: ObjectiveConfig, max_new_tokens: int) -> LengthRules | None:
        """Rules of an objective, for turns of up to `max_new_tokens`; None if it has no rules."""
        if not objective.mask_truncated and not objective.overlong_buffer:
            return None
        return cls(
            max_new_tokens=max_new_tokens,
            mask_truncated=objective.mask_truncated,
            overlong_buffer=objective.overlong_buffer,
        )

    def counts(self, stop_reason: StopReason) -> bool:
        """False if the reward of an episode with this stop reason does not count."""
        return not (self.mask_truncated and stop_reason is StopReason.LENGTH)

    def penalty(self, length: int) -> float:
        """Penalty of a turn of `length` tokens: 0 up to the buffer, within it growing to 1.

        DAPO's soft overlong punishment (Yu et al. 2025, equation 13), negated.
        """
        over = length - (self.max_new_tokens - self.overlong_buffer)
        return min(max(over, 0) / self.overlong_buffer, 1.0)
