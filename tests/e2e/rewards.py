"""Rewards that fail, as users' own do."""

import os


def refuses_zero(response: str, answer: str) -> float:
    """Fails on prompts whose answer is 0."""
    if answer == "0":
        raise ValueError("a prompt that answers 0")
    return float(answer in response)


def broken(response: str, answer: str) -> float:
    """Fails on all of them."""
    return len(response) / 0


def kills_at_zero(response: str, answer: str) -> float:
    """Ends its process, as a segmentation fault would, on prompts whose answer is 0."""
    if answer == "0":
        os._exit(3)
    return float(answer in response)
