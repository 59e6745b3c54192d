"""Verdict of a reward on a response: a number, and feedback for a teacher that reads it."""

from __future__ import annotations

from dataclasses import dataclass

# Of a program's complaint or of what a user's reward says; a context has little room.
LONGEST_WORDS = 1000
RIGHT = "Right."


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A reward, and what is to be said of the response (`{feedback}` of `teacher.feedback=`)."""

    reward: float
    feedback: str = ""


def against(reward: float, expected: str) -> Verdict:
    """That of a response which is right or wrong; of a wrong one it says what was expected."""
    return Verdict(reward=reward, feedback=RIGHT if reward > 0 else f"Wrong. {expected}")
