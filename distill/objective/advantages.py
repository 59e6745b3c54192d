"""Parts of a token's advantage: discounted sums and log-prob gaps. Numpy, no gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from distill.errors import DataError
from distill.stops import hits
from distill.types import BoolArray, FloatArray, Segment

if TYPE_CHECKING:  # rollout workers do not load torch
    from torch import Tensor

Gaps = TypeVar("Gaps", FloatArray, "Tensor")


def discounted_future_sum(values_N: np.ndarray, discount: float) -> np.ndarray:
    """S_t = v_t + g v_{t+1} + g^2 v_{t+2} + ... with g = `discount`; g = 0 returns v."""
    if discount == 0:
        return values_N
    sums_N = np.empty_like(values_N)
    running = 0.0
    for t in range(len(values_N) - 1, -1, -1):
        running = float(values_N[t]) + discount * running
        sums_N[t] = running
    return sums_N


def outside_top(segment: Segment, stop_event: tuple[int, ...] = ()) -> BoolArray:
    """Mask of the actions that are not among the tokens of `teacher_top`, shape (T,).

    `teacher_top` lists all tokens of the stop event under the id of the event's first token.

    Raises:
        DataError: the segment has no `teacher_top`.
    """
    if segment.teacher_top is None:
        raise DataError(
            "teacher_top is missing: the teacher was not asked for its top_k", field="teacher_top"
        )
    actions_N = segment.tokens_T[segment.action_mask_T]
    if stop_event:
        actions_N = np.where(hits(actions_N, stop_event), stop_event[0], actions_N)
    ids_NK = segment.teacher_top.ids_NK
    outside_N = np.ones(len(actions_N), np.bool_)
    # Each row has at most one match; finding the matches takes a fifth of the time of any(axis=1).
    outside_N[np.flatnonzero(ids_NK == actions_N[:, None]) // ids_NK.shape[1]] = False
    outside_T = segment.action_mask_T.copy()
    outside_T[outside_T] = outside_N
    return outside_T


def teacher_gaps(segment: Segment) -> FloatArray:
    """log p_T(y_t) - log q_T(y_t) of the action tokens, shape (actions,).

    Raises:
        DataError: the segment has not been scored by a teacher.
    """
    if segment.teacher_logprobs_T is None:
        raise DataError(
            "teacher_logprobs_T is missing: no teacher scored the segment (with estimator=full, "
            "teachers score only a part of the groups)",
            field="teacher_logprobs_T",
        )
    mask_T = segment.action_mask_T
    return segment.behaviour_logprobs_T[mask_T] - segment.teacher_logprobs_T[mask_T]


def clipped(gaps_N: Gaps, kl_clip: float | None) -> Gaps:
    """Clamp gaps (an array or a tensor) to [-kl_clip, kl_clip]; None leaves them unchanged."""
    return gaps_N if kl_clip is None else gaps_N.clip(-kl_clip, kl_clip)


def reference_gaps(segment: Segment) -> FloatArray:
    """kl_t = log p_T(y_t) - log ref_T(y_t) of the action tokens, shape (actions,).

    Raises:
        DataError: the segment has not been scored by a reference model.
    """
    if segment.reference_logprobs_T is None:
        raise DataError(
            "reference_logprobs_T is missing: no reference model scored the segment",
            field="reference_logprobs_T",
        )
    mask_T = segment.action_mask_T
    return segment.behaviour_logprobs_T[mask_T] - segment.reference_logprobs_T[mask_T]


def on_actions(segment: Segment, values_N: FloatArray) -> FloatArray:
    """Values placed at the action tokens, with zeros elsewhere, shape (T,)."""
    values_T = np.zeros(len(segment), dtype=np.float32)
    values_T[segment.action_mask_T] = values_N
    return values_T
