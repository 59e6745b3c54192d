"""Rewards that fail, like a user's own may."""

import os


def refuses_zero(response: str, answer: str) -> float:
    """Raise for prompts whose answer is 0."""
    if answer == "0":
        raise ValueError("a prompt that answers 0")
    return float(answer in response)


def broken(response: str, answer: str) -> float:
    """Raise for all prompts."""
    return len(response) / 0


def kills_at_zero(response: str, answer: str) -> float:
    """End the process for prompts whose answer is 0, like a segmentation fault."""
    if answer == "0":
        os._exit(3)
    return float(answer in response)
