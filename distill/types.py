"""Rollout data: Segment -> Trajectory -> TrajectoryGroup, validated at construction.

Legend of shape suffixes, the same letters everywhere in this project:

    _P  problems (prompts)     _G  members of one group      _T  tokens of one segment
    _D  training rows          _B  rows packed in a batch    _V  vocabulary
    _K  top-k                  _N  positions, flattened      _H  hidden size
    _L  layers (or, of what is packed end to end, tokens)

`tokens_P_G_T[p][g][t]` is one token. All log-probs are natural logarithms (nats). Arrays are numpy,
read-only after construction, so a group is a handful of buffers on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from distill.errors import DataError
from distill.privileged import check_context
from distill.routing import ExpertArray
from distill.sampling import check_temperature

TokenArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

# Rewards that differ by less, relative to their size, differ by rounding errors.
_REWARD_SPREAD = 1e-6
# A log-prob is at most 0; float rounding in log_softmax may put it this much above.
LOGPROB_SLACK = 1e-3


def same_reward(rewards: Sequence[float] | npt.NDArray[np.floating]) -> bool:
    """True if no reward is better than another: their spread is within rounding errors.

    The one test of a constant group, for advantages, filters, dynamic sampling and metrics.
    """
    return np.ptp(rewards) <= _REWARD_SPREAD * max(1.0, np.abs(rewards).max())


class StopReason(StrEnum):
    """Reason why an episode, or a sample, ended."""

    EOS = "eos"  # the model sampled one of its end-of-sequence tokens
    LENGTH = "length"  # max_new_tokens or the context's end
    ABORTED = "aborted"  # cancelled from outside; the tokens so far are kept
    DONE = "done"  # the environment has ended: a game is over, say
    TURNS = "turns"  # the environment's limit on turns
    TIME = "time"  # the environment's limit on seconds


def first_true(mask_T: BoolArray) -> int:
    """Index of the first True of a mask that has one.

    `np.argmax` gives the same, but lets go of the interpreter for it: a process whose other threads
    compute gets it back up to 5 ms later.
    """
    return mask_T.tobytes().index(True)


def _freeze(name: str, values: npt.ArrayLike, dtype: type[np.generic]) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise DataError(f"{name} has shape {array.shape}; it must be one-dimensional")
    if array.dtype != dtype:
        if np.issubdtype(dtype, np.integer) and not np.issubdtype(array.dtype, np.integer):
            raise DataError(f"{name} has dtype {array.dtype}; it must hold integers")
        given, array = array, array.astype(dtype)
        if not np.issubdtype(dtype, np.floating) and not np.array_equal(array, given):
            raise DataError(f"{name} holds values that {np.dtype(dtype)} cannot hold")
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


def _frozen_experts(experts_TLK: ExpertArray) -> ExpertArray:
    if experts_TLK.ndim != 3 or experts_TLK.dtype not in (np.uint8, np.uint16):
        raise DataError(
            f"experts_TLK has shape {experts_TLK.shape} and dtype {experts_TLK.dtype}; it must be "
            "(tokens, layers, experts of a token) in uint8 or uint16"
        )
    flat = _freeze("experts_TLK", experts_TLK.reshape(-1), experts_TLK.dtype.type)
    return flat.reshape(experts_TLK.shape)


def _check_logprobs(name: str, logprobs_T: FloatArray, mask_T: BoolArray) -> None:
    on_action_N = logprobs_T[mask_T]
    bad_N = ~np.isfinite(on_action_N) | (on_action_N > LOGPROB_SLACK)
    if bad_N.any():
        where = int(np.flatnonzero(mask_T)[np.argmax(bad_N)])
        raise DataError(
            f"{name}[{where}] = {logprobs_T[where]} on an action token: a log-prob must be finite "
            f"and at most 0 ({int(bad_N.sum())} of {len(on_action_N)} are not)"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopLogprobs:
    """Log-probs of K tokens at each of N positions; what is left of each is the tail.

    Attributes:
        ids_NK: int32 token ids, distinct within a row.
        logprobs_NK: float32 log-probs at the temperature of the segment (or score) they belong to.

    Raises:
        DataError: shapes differ, or a row is no part of a distribution.
    """

    ids_NK: npt.NDArray[np.int32]
    logprobs_NK: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.ids_NK.ndim != 2 or self.ids_NK.shape != self.logprobs_NK.shape:
            raise DataError(
                f"TopLogprobs: ids_NK has shape {self.ids_NK.shape} and logprobs_NK "
                f"{self.logprobs_NK.shape}; both must be (positions, K)"
            )
        for name, dtype in (("ids_NK", np.int32), ("logprobs_NK", np.float32)):
            flat = _freeze(f"TopLogprobs.{name}", getattr(self, name).reshape(-1), dtype)
            object.__setattr__(self, name, flat.reshape(self.ids_NK.shape))
        self._check_values()

    def _check_values(self) -> None:
        if not len(self):
            return
        if self.ids_NK.shape[1] < 1:
            raise DataError("TopLogprobs holds no token per position; K must be at least 1")
        ordered_NK = np.sort(self.ids_NK, axis=1)
        if ordered_NK[:, 0].min() < 0 or (np.diff(ordered_NK, axis=1) == 0).any():
            raise DataError("TopLogprobs.ids_NK names a token twice at a position, or a negative")
        if not np.isfinite(self.logprobs_NK).all():
            raise DataError("TopLogprobs.logprobs_NK is not finite")
        mass = float(np.exp(self.logprobs_NK.astype(np.float64)).sum(axis=1).max())
        if mass > 1 + LOGPROB_SLACK:
            raise DataError(f"TopLogprobs.logprobs_NK: a row's probabilities add up to {mass:.4f}")

    def __len__(self) -> int:
        return len(self.ids_NK)

    @property
    def k(self) -> int:
        return self.ids_NK.shape[1]

    def at(self, positions_M: npt.NDArray[Any]) -> TopLogprobs:
        """Rows of the given positions: indices, or a mask over all N."""
        return TopLogprobs(
            ids_NK=self.ids_NK[positions_M], logprobs_NK=self.logprobs_NK[positions_M]
        )

    def __setstate__(self, state: list[Any]) -> None:
        _restore_read_only(self, state)


def _restore_read_only(instance: Any, state: list[Any]) -> None:
    """Unpickling: pickle protocols below 5 forget that an array was read-only."""
    for attribute, value in zip(fields(instance), state, strict=True):
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        object.__setattr__(instance, attribute.name, value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """One flat token chain, exactly as the model saw it. All `_T` arrays have the same length.

    Attributes:
        tokens_T: int32 token ids: what was observed and what was sampled, in order.
        action_mask_T: True where the policy sampled the token. Position 0 is never an action.
        behaviour_logprobs_T: float32 log p_T(y_t | y_<t) of the sampling engine; 0 elsewhere.
        versions_T: int32 weight version that sampled the token; -1 elsewhere.
        temperature: the T of both log-prob arrays, and of the loss. Its only home in the data.
        teacher_logprobs_T: float32 log q_T(y_t | y_<t), at the same T; None until scored.
        teacher_logprobs_q1_T: the teacher's log-probs *unscaled* (q_1). Read by the bias meter
            only; no loss touches it. None where it was not asked for.
        policy_top_ids_NK: int32 ids of the policy's likeliest tokens, one row per action token:
            where the teacher is to be asked. None: not there, or asked already.
        teacher_top: the teacher's log-probs at T of several tokens, its own likeliest or the
            policy's, one row per action token; None where the objective needs none.
        teacher_context_T: int32 tokens that the teacher sees in place of the first
            `teacher_replaces`: a privileged context, such as a hint (`distill.privileged`). None:
            the same as the policy's.
        teacher_replaces: length of the episode's first observation where there is such a context;
            0 without one.
        reference_logprobs_T: float32 log-probs of the reference policy, at T; None without one.
        bonuses_T: float32 reward of single tokens, from the environment; None: no such rewards.
        experts_TLK: the experts of a mixture that the engine routed each token to, as
            `distill.routing` has them; None: a dense policy, or nobody replays them.
        teacher_version: weight version of the teacher that gave its log-probs, where it is the
            policy itself as it trains; None: its weights never change.
        scored_by: the engines that gave the teacher's and the reference's log-probs, by the numbers
            of their lives (`Score.scored_by`); of what a teacher sampled, its own.

    Raises:
        DataError: names the field that breaks a rule.
    """

    tokens_T: TokenArray
    action_mask_T: BoolArray
    behaviour_logprobs_T: FloatArray
    versions_T: TokenArray
    temperature: float
    teacher_logprobs_T: FloatArray | None = None
    teacher_logprobs_q1_T: FloatArray | None = None
    policy_top_ids_NK: TokenArray | None = None
    teacher_top: TopLogprobs | None = None
    teacher_context_T: TokenArray | None = None
    teacher_replaces: int = 0
    reference_logprobs_T: FloatArray | None = None
    bonuses_T: FloatArray | None = None
    experts_TLK: ExpertArray | None = None
    teacher_version: int | None = None
    scored_by: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        check_temperature(self.temperature, "Segment.temperature")
        set_(self, "temperature", float(self.temperature))
        set_(self, "tokens_T", _freeze("tokens_T", self.tokens_T, np.int32))
        mask_T = _freeze("action_mask_T", self.action_mask_T, np.bool_)
        set_(self, "action_mask_T", mask_T)
        set_(self, "versions_T", _freeze("versions_T", self.versions_T, np.int32))
        logprob_names = ["behaviour_logprobs_T"]
        for name in ("teacher_logprobs_T", "teacher_logprobs_q1_T", "reference_logprobs_T"):
            if getattr(self, name) is not None:
                logprob_names.append(name)
        float_names = [*logprob_names, *(["bonuses_T"] if self.bonuses_T is not None else [])]
        for name in float_names:
            set_(self, name, _freeze(name, getattr(self, name), np.float32))
        if self.teacher_context_T is not None:
            context_T = _freeze("teacher_context_T", self.teacher_context_T, np.int32)
            set_(self, "teacher_context_T", context_T)
        arrays = ["action_mask_T", "versions_T", *float_names]
        if self.experts_TLK is not None:
            set_(self, "experts_TLK", _frozen_experts(self.experts_TLK))
            arrays.append("experts_TLK")
        for name in arrays:
            if len(getattr(self, name)) != len(self.tokens_T):
                raise DataError(
                    f"{name} has {len(getattr(self, name))} entries for {len(self.tokens_T)} tokens"
                )
        self._check_values(logprob_names)

    def _check_values(self, logprob_names: list[str]) -> None:
        if len(self.tokens_T) == 0:
            raise DataError("tokens_T is empty")
        if self.tokens_T.min() < 0:
            raise DataError(f"tokens_T holds a negative id, {self.tokens_T.min()}")
        if self.action_mask_T[0]:
            raise DataError(
                "action_mask_T[0] is True: the first token has no context to sample from"
            )
        if not self.action_mask_T.any():
            raise DataError("action_mask_T is False everywhere: there is nothing to train on")
        if self.versions_T[self.action_mask_T].min() < 0:
            raise DataError("versions_T is negative on an action token")
        for name in logprob_names:
            _check_logprobs(name, getattr(self, name), self.action_mask_T)
        if self.bonuses_T is not None and not np.isfinite(self.bonuses_T).all():
            raise DataError("bonuses_T is not finite")
        check_context(
            self.teacher_context_T, self.teacher_replaces, self.first_action, "teacher_replaces"
        )
        if self.teacher_top is not None and len(self.teacher_top) != self.num_actions:
            raise DataError(
                f"teacher_top has {len(self.teacher_top)} rows for {self.num_actions} action tokens"
            )
        top_ids_NK = self.policy_top_ids_NK
        if top_ids_NK is not None and len(top_ids_NK) != self.num_actions:
            raise DataError(
                f"policy_top_ids_NK has {len(top_ids_NK)} rows for {self.num_actions} action tokens"
            )

    def __setstate__(self, state: list[Any]) -> None:
        _restore_read_only(self, state)

    def __len__(self) -> int:
        return len(self.tokens_T)

    @property
    def num_actions(self) -> int:
        return int(self.action_mask_T.sum())

    @property
    def first_action(self) -> int:
        """Index of the first action token, at least 1."""
        return first_true(self.action_mask_T)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One episode: its segments in order, its reward, and why it ended.

    `reward_counts` is False where the reward says nothing, as of an episode that was cut off.

    Raises:
        DataError: no segments, segments at different temperatures, or a non-finite reward.
    """

    segments: tuple[Segment, ...]
    reward: float
    stop_reason: StopReason
    metrics: Mapping[str, float] = field(default_factory=dict)
    reward_counts: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        if not self.segments:
            raise DataError("Trajectory.segments is empty")
        temperatures = {segment.temperature for segment in self.segments}
        if len(temperatures) > 1:
            raise DataError(f"Trajectory.segments mixes temperatures {sorted(temperatures)}")
        if not math.isfinite(self.reward):
            raise DataError(f"Trajectory.reward = {self.reward} is not finite")
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise DataError(f"Trajectory.metrics[{name!r}] = {value} is not finite")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryGroup:
    """The G trajectories of one prompt: the unit of delivery and of advantage.

    `group_id` is the prompt's place in the run's seeded prompt stream. It is the same in every
    attempt and after every resume, which is what lets delivery be exactly once. `metrics` are
    measurements of the group as a whole, such as the seconds its rollout took. `teacher` names the
    one that scored it, among several; `tag` is the prompt's own, for metrics by kind of prompt, and
    `source` the name of the prompt's source, where there are several. `answer` is what a right
    response says, where that is known: for people to judge the reward by. `by_teacher` is True of a
    group that the teacher sampled instead of the policy: its behaviour log-probs are log q_T, and
    it is trained on by cross-entropy (`distill.teacher_samples`). `as_text` is True of one of those
    that an endpoint wrote as text: nobody knows its log q_T, and its behaviour log-probs are 0.

    Raises:
        DataError: a negative id, no trajectories, or mixed temperatures.
    """

    group_id: int
    trajectories_G: tuple[Trajectory, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    teacher: str = ""
    tag: str | None = None
    source: str = ""
    answer: str | None = None
    by_teacher: bool = False
    as_text: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "trajectories_G", tuple(self.trajectories_G))
        if self.group_id < 0:
            raise DataError(f"TrajectoryGroup.group_id = {self.group_id} is negative")
        if not self.trajectories_G:
            raise DataError(f"group {self.group_id} has no trajectories")
        temperatures = {segment.temperature for segment in self.segments()}
        if len(temperatures) > 1:
            raise DataError(f"group {self.group_id} mixes temperatures {sorted(temperatures)}")

    def segments(self) -> Iterator[Segment]:
        for trajectory in self.trajectories_G:
            yield from trajectory.segments

    @property
    def scored_by(self) -> tuple[int, ...]:
        """The engines that scored any of it, by number, in order."""
        return tuple(sorted({number for each in self.segments() for number in each.scored_by}))

    @property
    def temperature(self) -> float:
        return self.trajectories_G[0].segments[0].temperature

    @property
    def constant_reward(self) -> float | None:
        """The reward of every member; None if they differ (`same_reward`).

        Rewards that do not count make no difference; where none does, the mean of all.
        """
        counted = [member.reward for member in self.trajectories_G if member.reward_counts]
        if not counted:
            return fmean(member.reward for member in self.trajectories_G)
        return counted[0] if same_reward(counted) else None

    @property
    def num_actions(self) -> int:
        return sum(segment.num_actions for segment in self.segments())
