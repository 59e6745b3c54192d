"""Check of a sampled group before it is delivered, so that bad data never reaches the learner.

The check runs once a group, over columns: one field of all its segments, end to end. A group has
dozens of small arrays, and a numpy call costs a microsecond whatever their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distill.errors import DataError
from distill.privileged import check_context
from distill.sampling import check_temperature
from distill.types import LOGPROB_SLACK, Segment, TrajectoryGroup

_INT, _BOOL, _FLOAT = np.dtype(np.int32), np.dtype(np.bool_), np.dtype(np.float32)
_LOGPROBS = (
    "behaviour_logprobs_T", "teacher_logprobs_T", "teacher_logprobs_q1_T", "reference_logprobs_T",
)  # fmt: skip


def check_group(group: TrajectoryGroup) -> None:
    """Check that a group, its trajectories and its segments keep the rules of their types.

    Raises:
        DataError: a rule is broken; the message and `field` name the field.
    """
    if group.group_id < 0:
        raise _error("group_id", f"{group.group_id} is negative")
    if not group.trajectories_G:
        raise _error("trajectories_G", f"of group {group.group_id} is empty")
    for trajectory in group.trajectories_G:
        if not trajectory.segments:
            raise _error("segments", "of a trajectory is empty")
        for name, value in (("reward", trajectory.reward), *trajectory.metrics.items()):
            if not math.isfinite(value):
                raise _error(name, f"= {value} of a trajectory is not finite")
    segments = list(group.segments())
    temperatures = {segment.temperature for segment in segments}
    for temperature in temperatures:
        check_temperature(temperature, "Segment.temperature")
    if len(temperatures) > 1:
        raise _error("temperature", f"differs within group {group.group_id}: {temperatures}")
    _check_actions(segments)
    for name in _LOGPROBS:
        _check_logprobs(name, segments)
    paid = [segment for segment in segments if segment.bonuses_T is not None]
    bonuses_L = _column("bonuses_T", _FLOAT, paid)
    _refuse("bonuses_T", ~np.isfinite(bonuses_L), bonuses_L, paid, "is not finite")
    for segment in segments:
        _check_optional_parts(segment)


def _check_actions(segments: Sequence[Segment]) -> None:
    """Check the tokens of all segments, and the versions and places of those that were sampled."""
    tokens_L = _column("tokens_T", _INT, segments)
    mask_L = _column("action_mask_T", _BOOL, segments)
    versions_L = _column("versions_T", _INT, segments)
    _refuse("tokens_T", tokens_L < 0, tokens_L, segments, "is a negative id")
    _refuse("versions_T", mask_L & (versions_L < 0), versions_L, segments, "on an action token")
    lengths = np.array([len(segment) for segment in segments])
    starts = lengths.cumsum() - lengths
    actions_N = np.append(np.flatnonzero(mask_L), len(mask_L))
    firsts = actions_N[np.searchsorted(actions_N, starts)] - starts
    stored = np.array([segment.first_action for segment in segments])
    if not (firsts >= lengths).any() and not (firsts == 0).any() and (firsts == stored).all():
        return
    for first, length, segment in zip(firsts.tolist(), lengths.tolist(), segments, strict=True):
        if first >= length:
            raise _error("action_mask_T", "is False everywhere: there is nothing to train on")
        if first == 0:
            raise _error("action_mask_T", "[0] is True: the first token has no context")
        if first != segment.first_action:
            raise _error("first_action", f"= {segment.first_action}; the first action is {first}")


def _check_logprobs(name: str, segments: Sequence[Segment]) -> None:
    scored = [segment for segment in segments if getattr(segment, name) is not None]
    if not scored:
        return
    logprobs_L = _column(name, _FLOAT, scored)
    mask_L = np.concatenate([segment.action_mask_T for segment in scored])
    good_L = (logprobs_L <= LOGPROB_SLACK) & (logprobs_L > -np.inf)  # both are False for a NaN
    why = "on an action token: a log-prob must be finite and at most 0"
    _refuse(name, mask_L & ~good_L, logprobs_L, scored, why)


def _check_optional_parts(segment: Segment) -> None:
    check_context(
        segment.teacher_context_T,
        segment.teacher_replaces,
        segment.first_action,
        "teacher_replaces",
    )
    for name in ("teacher_top", "policy_top_ids_NK"):
        rows = getattr(segment, name)
        if rows is not None and len(rows) != segment.num_actions:
            raise _error(name, f"has {len(rows)} rows for {segment.num_actions} action tokens")
    experts_TLK = segment.experts_TLK
    if experts_TLK is not None and (
        experts_TLK.ndim != 3
        or len(experts_TLK) != len(segment)
        or experts_TLK.dtype not in (np.uint8, np.uint16)
    ):
        raise _error(
            "experts_TLK",
            f"has shape {experts_TLK.shape} and dtype {experts_TLK.dtype}; it must be (tokens, "
            f"layers, experts of a token) in uint8 or uint16, of {len(segment)} tokens",
        )


def _column(name: str, dtype: np.dtype, segments: Sequence[Segment]) -> np.ndarray:
    """One field of all segments, end to end."""
    for segment in segments:
        values_T, length = getattr(segment, name), len(segment.tokens_T)
        if not length or values_T.dtype != dtype or values_T.shape != (length,):
            raise _error(
                name,
                f"has shape {values_T.shape} and dtype {values_T.dtype}; it must have one {dtype} "
                f"for each of at least one token, here {length}",
            )
    return np.concatenate([np.empty(0, dtype), *(getattr(each, name) for each in segments)])


def _refuse(
    name: str,
    bad_L: npt.NDArray[np.bool_],
    values_L: np.ndarray,
    segments: Sequence[Segment],
    why: str,
) -> None:
    """Raise DataError if any value of a column is bad; the message has the first and its place."""
    if not bad_L.any():
        return
    where = first = int(np.argmax(bad_L))
    for segment in segments:
        if where < len(segment):
            break
        where -= len(segment)
    raise _error(name, f"[{where}] = {values_L[first]} {why} ({np.count_nonzero(bad_L)} are bad)")


def _error(field: str, what: str) -> DataError:
    space = "" if what.startswith("[") else " "
    return DataError(f"{field}{space}{what}", field=field)
