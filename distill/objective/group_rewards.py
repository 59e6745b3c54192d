"""Rewards of a group of samples: everything that their advantages may depend on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distill.records import TrajectoryGroupMeta
from distill.types import BoolArray, StopReason, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRewards:
    """Rewards of a group's members, and the other facts that an advantage may depend on.

    Attributes:
        rewards_G: rewards in float64, including the penalty for overlong responses. In float32 the
            mean of equal rewards can differ from each reward, and the standard deviation would then
            be that rounding error.
        lengths_G: numbers of sampled tokens.
        truncated_G: True where the episode ended by length.
        counted_G: False where mask_truncated excludes the reward; the advantage is then 0.
        source, tag: source and tag of the prompt, see `TrajectoryGroup`.
    """

    rewards_G: npt.NDArray[np.float64]
    lengths_G: npt.NDArray[np.int64]
    truncated_G: BoolArray
    counted_G: BoolArray
    source: str = ""
    tag: str | None = None

    @classmethod
    def of(cls, group: TrajectoryGroup | TrajectoryGroupMeta) -> GroupRewards:
        if isinstance(group, TrajectoryGroupMeta):
            rewards, counted = group.rewards_G, group.reward_counts_G
            reasons, lengths = group.stop_reasons_G, group.lengths_G
        else:
            members = group.trajectories_G
            rewards = [member.reward for member in members]
            counted = [member.reward_counts for member in members]
            reasons = [member.stop_reason for member in members]
            lengths = [sum(s.num_actions for s in m.segments) for m in members]
        return cls(
            rewards_G=np.array(rewards, np.float64),
            lengths_G=np.array(lengths),
            truncated_G=np.array([reason is StopReason.LENGTH for reason in reasons]),
            counted_G=np.array(counted),
            source=group.source,
            tag=group.tag,
        )
