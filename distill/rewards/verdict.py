"""Verdict of a reward on a response: a number, and feedback that a teacher may read."""

from __future__ import annotations

from dataclasses import dataclass

# Maximum number of characters of feedback, because a context has little room.
LONGEST_WORDS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A reward, and feedback on the response (`{feedback}` of `teacher.feedback=`)."""

    reward: float
    feedback: str = ""
