"""Privileged contexts: what a teacher sees in place of an episode's first observation.

    the student saw    prompt    y1 ... yn   observed   y ...
    the teacher sees   context   y1 ... yn   observed   y ...

The context replaces the tokens of the first observation, and nothing else: every later token,
trained or not, is the same on both sides, shifted by `len(context_T) - replaced` positions for the
teacher. Served and local teachers both use this module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distill.errors import DataError


def in_context(
    values_T: np.ndarray[Any, Any], context_T: np.ndarray[Any, Any], replaced: int
) -> np.ndarray[Any, Any]:
    """Replace the first `replaced` values with those of the context."""
    return np.concatenate([context_T, values_T[replaced:]])


def check_context(
    context_T: np.ndarray[Any, Any] | None, replaced: int, first: int, what: str
) -> None:
    """Raise DataError if a context cannot replace `replaced` tokens.

    Args:
        replaced: number of replaced tokens; 0 without a context.
        first: index of the first token that is sampled or trained; replaced tokens precede it.
        what: name of `replaced` for the message.
    """
    if context_T is None:
        if replaced != 0:
            raise DataError(
                f"{what} = {replaced} without a teacher_context_T to replace them", field=what
            )
        return
    if len(context_T) == 0:
        raise DataError(
            "teacher_context_T is empty: the first action needs a context",
            field="teacher_context_T",
        )
    if not 1 <= replaced <= first:
        raise DataError(
            f"{what} = {replaced}: teacher_context_T replaces the first observation, at least "
            f"one token and at most the {first} before the first action",
            field=what,
        )
