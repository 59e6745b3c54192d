"""Privileged contexts: what a teacher sees in place of an episode's first observation.

    the student saw    prompt    y1 ... yn   observed   y ...
    the teacher sees   context   y1 ... yn   observed   y ...

The context stands for as many leading tokens as the first observation has, and for nothing else:
every later token, trained or not, is the same on both sides, `len(context_T) - replaced` places
further on at the teacher's. Served and local teachers both ask here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distill.errors import DataError


def in_context(
    values_T: np.ndarray[Any, Any], context_T: np.ndarray[Any, Any], replaced: int
) -> np.ndarray[Any, Any]:
    """The values with those of the context in place of the first `replaced`."""
    return np.concatenate([context_T, values_T[replaced:]])


def check_context(
    context_T: np.ndarray[Any, Any] | None, replaced: int, first: int, what: str
) -> None:
    """Raises DataError for a context that cannot stand for `replaced` tokens, all before the first
    that is sampled or trained, at `first`; or for a number without a context."""
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
            f"{what} = {replaced}: teacher_context_T stands for the first observation, at least "
            f"one token and at most the {first} before the first action",
            field=what,
        )
