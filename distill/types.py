"""Rollout data: Segment -> Trajectory -> TrajectoryGroup.

Constructors check nothing. A rollout worker checks a whole group once, before it is delivered
(`distill.columns.checked`).

Legend of shape suffixes, the same letters everywhere in this project:

    _P  problems (prompts)     _G  members of one group      _T  tokens of one segment
    _D  training rows          _B  rows packed in a batch    _V  vocabulary
    _K  top-k                  _N  positions, flattened      _H  hidden size
    _L  layers (or, of what is packed end to end, tokens)

`tokens_P_G_T[p][g][t]` is one token. All log-probs are natural logarithms (nats). Arrays are numpy,
and never changed in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from distill.errors import DataError
from distill.routing import ExpertArray

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any  # an annotation does not need transformers, whose import takes seconds

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
    DONE = "done"  # the environment has ended: for example, a game is over
    TURNS = "turns"  # the environment's limit on turns
    TIME = "time"  # the environment's limit on seconds


def _freeze(name: str, values: npt.ArrayLike, dtype: type[np.generic]) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise DataError(f"{name} has shape {array.shape}; it must be one-dimensional")
    if array.dtype != dtype:
        if np.issubdtype(dtype, np.integer) and not np.issubdtype(array.dtype, np.integer):
            raise DataError(f"{name} has dtype {array.dtype}; it must hold integers")
        given, array = array, array.astype(dtype)
        if not np.issubdtype(dtype, np.floating) and not np.array_equal(array, given):
            raise DataError(f"{name} has values outside the range of {np.dtype(dtype)}")
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopLogprobs:
    """Log-probs of K tokens at each of N positions; the rest of each distribution is the tail.

    Attributes:
        ids_NK: int32 token ids, distinct within a row.
        logprobs_NK: float32 log-probs at the temperature of the segment (or score) they belong to.

    Raises:
        DataError: shapes differ, or a row cannot be part of a distribution.
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
            raise DataError("TopLogprobs has no tokens; K must be at least 1")
        ordered_NK = np.sort(self.ids_NK, axis=1)
        if ordered_NK[:, 0].min() < 0 or (np.diff(ordered_NK, axis=1) == 0).any():
            raise DataError(
                "TopLogprobs.ids_NK has a duplicate token at a position, or a negative id"
            )
        if not np.isfinite(self.logprobs_NK).all():
            raise DataError("TopLogprobs.logprobs_NK is not finite")
        mass = float(np.exp(self.logprobs_NK.astype(np.float64)).sum(axis=1).max())
        if mass > 1 + LOGPROB_SLACK:
            raise DataError(f"TopLogprobs.logprobs_NK: a row's probabilities sum to {mass:.4f}")

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """One flat token chain, exactly as the model saw it. All `_T` arrays have the same length.

    Attributes:
        tokens_T: int32 token ids, observed and sampled, in order.
        action_mask_T: True where the policy sampled the token. Position 0 is never an action.
        behaviour_logprobs_T: float32 log p_T(y_t | y_<t) of the sampling engine; 0 elsewhere.
        versions_T: int32 weight version that sampled the token; -1 elsewhere.
        temperature: the T of both log-prob arrays, and of the loss. The only place of T in the
            data.
        first_action: index of the first action token, at least 1.
        teacher_logprobs_T: float32 log q_T(y_t | y_<t), at the same T; None until scored.
        teacher_logprobs_q1_T: the teacher's *unscaled* log-probs (q_1). Only the bias meter reads
            them; no loss does. None if not requested.
        policy_top_ids_NK: int32 ids of the policy's likeliest tokens, one row per action token, at
            which the teacher is to be scored. None: not requested, or scored already.
        teacher_top: the teacher's log-probs at T of several tokens, its own likeliest or the
            policy's, one row per action token; None if the objective needs none.
        teacher_states: the teacher's hidden states, one per action token, for its head in the
            learner (`distill.states`). On the way to the learner it is a reference to them, owned
            by the actor of the teacher's engine. None if the objective needs none, and in kept
            groups.
        teacher_context_T: int32 tokens that the teacher sees in place of the first
            `teacher_replaces`: a privileged context, such as a hint (`distill.privileged`). None:
            the teacher sees the policy's tokens.
        teacher_replaces: length of the episode's first observation if there is such a context;
            else 0.
        reference_logprobs_T: float32 log-probs of the reference policy, at T; None without one.
        bonuses_T: float32 reward of single tokens, from the environment; None: no such rewards.
        experts_TLK: experts of a mixture that the engine routed each token to, in the format of
            `distill.routing`; None: a dense policy, or no replay.
        teacher_version: weight version of the teacher that scored, if the teacher follows the
            policy; None: its weights never change.
        scored_by: numbers of the replicas that computed the teacher's and the reference's log-probs
            (`Score.scored_by`); of tokens that a teacher sampled, the teacher's replica.
    """

    tokens_T: TokenArray
    action_mask_T: BoolArray
    behaviour_logprobs_T: FloatArray
    versions_T: TokenArray
    temperature: float
    first_action: int
    teacher_logprobs_T: FloatArray | None = None
    teacher_logprobs_q1_T: FloatArray | None = None
    policy_top_ids_NK: TokenArray | None = None
    teacher_top: TopLogprobs | None = None
    teacher_states: Any = None
    teacher_context_T: TokenArray | None = None
    teacher_replaces: int = 0
    reference_logprobs_T: FloatArray | None = None
    bonuses_T: FloatArray | None = None
    experts_TLK: ExpertArray | None = None
    teacher_version: int | None = None
    scored_by: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens_T)

    @property
    def num_actions(self) -> int:
        return int(np.count_nonzero(self.action_mask_T))

    @property
    def action_spans(self) -> list[tuple[int, int]]:
        """Spans [start, stop) of sampled tokens, one per turn."""
        edges = np.flatnonzero(np.diff(self.action_mask_T.astype(np.int8), prepend=0, append=0))
        return [(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One episode: its segments in order, its reward, and why it ended.

    `reward_counts` is False if the reward is meaningless, as for an episode that was cut off.
    """

    segments: tuple[Segment, ...]
    reward: float
    stop_reason: StopReason
    metrics: Mapping[str, float] = field(default_factory=dict)
    reward_counts: bool = True


def shared_fields(kind: type[DataclassInstance], record: object) -> dict[str, Any]:
    """Values that `record` has for the fields of the dataclass `kind`, by name."""
    return {each.name: getattr(record, each.name) for each in fields(kind)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupFacts:
    """Facts of a group of trajectories as a whole.

    Attributes:
        group_id: the prompt's position in the run's seeded prompt stream. It is the same in every
            attempt and after every resume, which makes exactly-once delivery possible.
        metrics: measurements of the group as a whole, such as the seconds of its rollout.
        teacher: name of the teacher that scored it, if there are several.
        tag: the prompt's tag, for metrics by kind of prompt.
        source: name of the prompt's source, if there are several.
        answer: content of a correct response, if known: for people who judge the reward.
        by_teacher: True if the teacher sampled the group instead of the policy. Its behaviour
            log-probs are log q_T, and the loss is cross-entropy (`distill.group_share`).
        as_text: True if it is a teacher's group that an endpoint returned as text. Its log q_T is
            unknown, and its behaviour log-probs are 0.
    """

    group_id: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    teacher: str = ""
    tag: str | None = None
    source: str = ""
    answer: str | None = None
    by_teacher: bool = False
    as_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryGroup(GroupFacts):
    """The G trajectories of one prompt: the unit of delivery and of advantage."""

    trajectories_G: tuple[Trajectory, ...]

    def segments(self) -> Iterator[Segment]:
        for trajectory in self.trajectories_G:
            yield from trajectory.segments

    @property
    def scored_by(self) -> tuple[int, ...]:
        """Numbers of the replicas that scored any of the group's segments, in order."""
        return tuple(sorted({number for each in self.segments() for number in each.scored_by}))

    @property
    def temperature(self) -> float:
        return self.trajectories_G[0].segments[0].temperature

    @property
    def constant_reward(self) -> float | None:
        """The reward of every member; None if they differ (`same_reward`).

        Rewards that do not count are ignored; if none counts, the mean of all rewards.
        """
        counted = [member.reward for member in self.trajectories_G if member.reward_counts]
        if not counted:
            return fmean(member.reward for member in self.trajectories_G)
        return counted[0] if same_reward(counted) else None

    @property
    def num_actions(self) -> int:
        return sum(segment.num_actions for segment in self.segments())
