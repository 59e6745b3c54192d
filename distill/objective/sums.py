"""Metadata of a group from its columns: sizes, digests, and the sums of a step's metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from distill.columns import GroupColumns, pack
from distill.records import Sum, TrajectoryGroupMeta
from distill.types import GroupFacts, StopReason, TrajectoryGroup, shared_fields

# Number of first turns whose reverse KL is reported separately.
TURNS_SHOWN = 8
# `opd/kl_top_share` covers this share of a group's tokens: those furthest from the teacher.
_TOP = 0.01
# A group of equal members counts as equal only if independent samples would all be equal with a
# probability below this.
_BY_CHANCE = 1e-6
# Length, in tokens, of a run. A run that occurs a second time is a repetition.
RUN = 8
# Base of the polynomial hash of a run, modulo 2^64.
_BASE = np.uint64(0x9E3779B97F4A7C15)


def meta_of(group: TrajectoryGroup, columns: GroupColumns | None = None) -> TrajectoryGroupMeta:
    """Metadata of a group.

    Args:
        columns: the group's columns; None: they are built.
    """
    columns = columns or pack(group.trajectories_G)
    actions = ActionTokens(group, columns)
    sums = {name: found for name, of in SUMS.items() if (found := of(actions)) is not None}
    firsts_S = columns.values["first_action"]
    contexts_S, prefixes_S = [], []
    tokens_L, start = columns.arrays["tokens_T"], 0
    for length, first in zip(columns.tokens_S, firsts_S, strict=True):
        context = tokens_L[start : start + first].tobytes()
        contexts_S.append(_digest(context))
        prefixes_S.append(_digest(context[: -tokens_L.itemsize]))
        start += length
    return TrajectoryGroupMeta(
        **shared_fields(GroupFacts, group),
        rewards_G=tuple(member.reward for member in group.trajectories_G),
        reward_counts_G=tuple(member.reward_counts for member in group.trajectories_G),
        stop_reasons_G=tuple(member.stop_reason for member in group.trajectories_G),
        metrics_G=tuple(member.metrics for member in group.trajectories_G),
        segments_G=columns.segments_G,
        tokens_S=columns.tokens_S,
        actions_S=tuple(actions.counts_S),
        first_actions_S=firsts_S,
        contexts_S=tuple(contexts_S),
        prefixes_S=tuple(prefixes_S),
        constant_reward=group.constant_reward,
        scored_by=group.scored_by,
        oldest_version=int(actions.of("versions_T").min()),
        sums=sums | _turn_sums(actions),
    )


def _digest(tokens: bytes) -> bytes:
    return blake2b(tokens, digest_size=8).digest()


class ActionTokens:
    """Action tokens of a group, end to end (`_N`), and sums over them."""

    def __init__(self, group: TrajectoryGroup, columns: GroupColumns) -> None:
        self.group, self.columns = group, columns
        self.members = len(columns.segments_G)
        mask_L = columns.arrays["action_mask_T"]
        self.index_N = np.flatnonzero(mask_L)  # in the columns
        self._ends_S = np.cumsum(columns.tokens_S)
        upto_S = np.searchsorted(self.index_N, self._ends_S).tolist()
        self.counts_S = [end - start for start, end in pairwise([0, *upto_S])]
        # Indices into `_N` of the starts of turns. No segment begins with an action, so no turn
        # extends over two segments.
        is_start_N = np.ones(len(self.index_N), np.bool_)
        np.greater(self.index_N[1:], self.index_N[:-1] + 1, out=is_start_N[1:])
        self.turns_M = np.flatnonzero(is_start_N)

    def __len__(self) -> int:
        return len(self.index_N)

    def of(self, name: str) -> np.ndarray:
        """Values of a field that every segment has, at the action tokens, shape (N,)."""
        return self.columns.arrays[name][self.index_N]

    @cached_property
    def gaps_N(self) -> npt.NDArray[np.float64] | None:
        """log p_T - log q_T, NaN in segments without scores; None if no segment has scores."""
        return self._gaps("teacher_logprobs_T")

    def gap_to(self, name: str) -> Sum | None:
        """Sum of log p_T minus the log-probs of the field; None unless every segment has it."""
        if not self.columns.all_have(name):
            return None
        gaps_N = self._gaps(name)
        return None if gaps_N is None else (float(gaps_N.sum()), len(self))

    def _gaps(self, name: str) -> npt.NDArray[np.float64] | None:
        others_L = self.columns.per_token(name)
        if others_L is None:
            return None
        return self.of("behaviour_logprobs_T").astype(np.float64) - others_L[self.index_N]

    @property
    def turn_numbers_M(self) -> npt.NDArray[np.int64]:
        """Zero-based number of each turn within its trajectory."""
        ends_G = self._ends_S[np.cumsum(self.columns.segments_G) - 1]
        members_M = np.searchsorted(ends_G, self.index_N[self.turns_M], side="right")
        return np.arange(len(members_M)) - np.searchsorted(members_M, members_M)


def _turn_sums(actions: ActionTokens) -> dict[str, Sum]:
    """Reverse KL of the first turns of all trajectories, by turn number."""
    gaps_N, starts_M = actions.gaps_N, actions.turns_M
    if gaps_N is None:
        return {}
    gaps_M = np.add.reduceat(gaps_N, starts_M)
    sizes_M = np.add.reduceat(np.ones_like(gaps_N), starts_M)
    numbers_M = actions.turn_numbers_M
    shown_M = (numbers_M < TURNS_SHOWN) & ~np.isnan(gaps_M)
    numbers_M = numbers_M[shown_M]
    gaps, tokens = (np.bincount(numbers_M, each_M[shown_M]) for each_M in (gaps_M, sizes_M))
    return {
        f"opd/reverse_kl/turn={number + 1}": (gap, count)
        for number, (gap, count) in enumerate(zip(gaps.tolist(), tokens.tolist(), strict=True))
        if count
    }


def _versions(actions: ActionTokens) -> Sum:
    return float(actions.of("versions_T").sum(dtype=np.int64)), len(actions)


def _teacher_versions(actions: ActionTokens) -> Sum | None:
    versions_S = actions.columns.values["teacher_version"]
    if None in versions_S:
        return None
    return float(np.dot(versions_S, actions.counts_S)), len(actions)


def _top_share(actions: ActionTokens) -> Sum | None:
    """Sums of |log p_T - log q_T| over its largest 1 % of tokens (rounded up) and over all."""
    gaps_N = actions.gaps_N
    if gaps_N is None or not actions.columns.all_have("teacher_logprobs_T"):
        return None
    sizes_N = np.abs(gaps_N)
    top = math.ceil(_TOP * len(sizes_N))
    largest_N = np.partition(sizes_N, len(sizes_N) - top)[-top:]
    return float(largest_N.sum()), max(float(sizes_N.sum()), 1e-12)


def _bonuses(actions: ActionTokens) -> Sum | None:
    bonuses_L = actions.columns.arrays.get("bonuses_T")
    return None if bonuses_L is None else (float(bonuses_L.sum(dtype=np.float64)), actions.members)


def repeated_share(parts: Sequence[npt.NDArray[np.integer]]) -> float:
    """Number of runs of `RUN` tokens that occurred earlier in the response, per token.

    The share is near 0 for prose and near 1 for a response in a loop. Each part is the tokens that
    were sampled in one segment; runs do not cross from one part into the next.
    """
    hashes = [_hashes(part_N) for part_N in parts if len(part_N) >= RUN]
    tokens = sum(len(part_N) for part_N in parts)
    if not hashes or not tokens:
        return 0.0
    runs_M = np.sort(np.concatenate(hashes))
    return np.count_nonzero(runs_M[1:] == runs_M[:-1]) / tokens


def _hashes(tokens_N: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Hash of each run: equal runs have equal hashes, and collisions are practically impossible."""
    tokens_N = tokens_N.astype(np.uint64)
    runs = len(tokens_N) - RUN + 1
    total_M = np.zeros(runs, np.uint64)
    for i in range(RUN):
        total_M = total_M * _BASE + tokens_N[i : i + runs] + np.uint64(1)
    return total_M


def _repeated(actions: ActionTokens) -> Sum:
    if max(actions.counts_S) < RUN:
        return 0.0, actions.members
    tokens_N, ends = actions.of("tokens_T"), np.cumsum(actions.counts_S).tolist()
    parts = iter([tokens_N[start:end] for start, end in pairwise([0, *ends])])
    shares = [repeated_share(list(islice(parts, n))) for n in actions.columns.segments_G]
    return sum(shares), actions.members


def _equal(actions: ActionTokens) -> Sum:
    """1 if all members are equal and chance is no explanation (`_BY_CHANCE`), else 0."""
    columns, members = actions.columns, actions.members
    per_member, rest = divmod(len(columns.tokens_S), members)
    lengths = columns.tokens_S[:per_member]
    if members < 2 or rest or columns.tokens_S != lengths * members:
        return 0.0, 1
    tokens_GT = columns.arrays["tokens_T"].reshape(members, -1)
    if len(set(columns.segments_G)) > 1 or (tokens_GT != tokens_GT[0]).any():
        return 0.0, 1
    first_N = actions.of("behaviour_logprobs_T")[: sum(actions.counts_S[:per_member])]
    logprob = float(first_N.sum(dtype=np.float64))
    return float((members - 1) * logprob < math.log(_BY_CHANCE)), 1


def _rewards(actions: ActionTokens) -> Sum:
    return sum(member.reward for member in actions.group.trajectories_G), actions.members


def _ended(actions: ActionTokens) -> Sum:
    reasons = [member.stop_reason for member in actions.group.trajectories_G]
    return reasons.count(StopReason.EOS), actions.members


# Functions that return a group's sum and its weight, or None if the group has no such sum. The
# metric of a step of the same name is the ratio of the two totals over the step's groups
# (distill/objective/metrics.py).
SUMS: Mapping[str, Callable[[ActionTokens], Sum | None]] = {
    "staleness/version": _versions,
    "reward/mean": _rewards,
    "reward/bonus": _bonuses,
    "rollout/response_length": lambda actions: (len(actions), actions.members),
    "rollout/eos_share": _ended,
    "rollout/repeated_share": _repeated,
    "rollout/equal_groups": _equal,
    "rollout/turns": lambda actions: (len(actions.turns_M), actions.members),
    "rollout/segments": lambda actions: (len(actions.columns.tokens_S), actions.members),
    "opd/reverse_kl": lambda actions: actions.gap_to("teacher_logprobs_T"),
    "opd/reverse_kl_vs_q1": lambda actions: actions.gap_to("teacher_logprobs_q1_T"),
    "opd/kl_top_share": _top_share,
    "opd/teacher_version": _teacher_versions,
    "reference/kl": lambda actions: actions.gap_to("reference_logprobs_T"),
}
