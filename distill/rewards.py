"""Task rewards: plain functions from a response and a reference answer to a number."""

from __future__ import annotations


def exact_match(response: str, answer: str) -> float:
    """1 if the response equals the answer, surrounding whitespace aside, else 0."""
    return float(response.strip() == answer.strip())
