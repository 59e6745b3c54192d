"""Detectors of rewards that teach nothing or the wrong thing, and of groups that fail."""

from __future__ import annotations

from cluster.config.on_policy import RolloutConfig
from cluster.findings.finding import Diagnosis, Finding
from cluster.findings.history import SPAN, History
from cluster.findings.training import PATIENCE, declined, gained

# Share of groups whose members all have one reward.
_CONSTANT = 0.95
# Growth of the share of responses in the required format.
_FORMAT_GREW = 0.15


def advantages_are_zero(history: History, config: RolloutConfig) -> Diagnosis | None:
    """No token has had an advantage since the first step, so nothing has been learnt."""
    extremes = [history.of(f"advantage/{end}") for end in ("min", "max")]
    groups = history.of("train/groups")
    zero = all(series is not None and not any(series.values) for series in extremes)
    if not zero and (groups is None or any(groups.values)):
        return None
    if not config.objective.reward_coef > 0:
        why = "the terms of all sampled tokens are 0"
        remedy = "check that teacher= is the right checkpoint"
    elif _masked(history, config):
        why = "the rewards of episodes that are cut off do not count (mask_truncated=True)"
        remedy = "raise max_new_tokens"
    else:
        why = "all members of each group have the same reward"
        remedy = (
            "test the reward on the kept responses; use problems that are solved sometimes, or "
            "a larger group_size"
        )
    return Diagnosis(
        text=f"all advantages are 0 so far: {why}",
        remedy=remedy,
    )


def rewards_are_constant(history: History, config: RolloutConfig) -> Diagnosis | None:
    """Hardly any group has members with different rewards, so there is nothing to learn from."""
    constant, reward = history.of("reward/constant_groups", SPAN), history.of("reward/mean", SPAN)
    if not config.objective.reward_coef > 0 or constant is None or reward is None:
        return None
    if constant.now < _CONSTANT or gained(reward) or _masked(history, config):
        return None  # for masked rewards, `advantages_are_zero` names the cause
    return Diagnosis(
        text=f"in {constant.now:.0%} of the groups all members have the same reward "
        f"(mean {reward.now:.3g}), so the reward gives them no advantage",
        remedy="test the reward on the kept responses; use other prompts, a larger group_size, or, "
        "if a few groups differ, constant_groups=replace (rl)",
    )


def _masked(history: History, config: RolloutConfig) -> bool:
    """True if hardly any reward counts, because episodes are cut off."""
    cut = history.of("rollout/stop/length")
    return config.objective.mask_truncated and cut is not None and cut.values[-1] >= _CONSTANT


def format_pays_alone(history: History, _config: RolloutConfig) -> Diagnosis | None:
    """The policy learns the format's reward at the expense of the task's reward."""
    format_, reward = history.of("env/format", PATIENCE), history.of("reward/mean", PATIENCE)
    if format_ is None or reward is None:
        return None
    if format_.now - format_.start < _FORMAT_GREW or not declined(reward):
        return None
    best = reward.means[reward.highest()]
    return Diagnosis(
        text=f"the share of responses in the format (env/format) has grown from "
        f"{format_.start:.0%} to {format_.now:.0%}, and the task's reward has fallen from "
        f"{best:.3g} to {reward.now:.3g}",
        remedy="the format is rewarded without a right answer: lower env.format_reward, or make "
        "the reward itself require the format",
    )


def groups_fail(group_id: int, reason: str, step: int) -> Finding:
    """First group that is set aside for a kind of reason: its problem is not trained any more.

    Reported by the queue, not by a metric. The reason names the error, the user's file and line,
    and the problem.
    """
    return Finding(
        name="groups_fail",
        step=step,
        text=f"group {group_id} is set aside and will not be trained on: {reason}",
        remedy="correct the environment, the reward or the row, and start another out=: without "
        "the failing problems, the training data is a biased selection",
    )
