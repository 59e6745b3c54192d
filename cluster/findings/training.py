"""Detectors of faults in the training of the policy: KL, entropy, engines, lost updates."""

from __future__ import annotations

from cluster.config.on_policy import RolloutConfig
from cluster.findings.finding import Diagnosis
from cluster.findings.history import SPAN, History, Series

# Number of steps that are the start of the KL, and number of steps before a trend is reported.
_BEGINNING, PATIENCE = 3, 3 * SPAN
# The KL fell below this share of its start, and has risen by this factor.
_FALLEN, _RISEN = 0.7, 1.6
# Further conditions on a rise after a fall that does not exceed the start, to exclude chance: the
# gradient norm has grown by this factor, or the entropy has changed by so many nats.
_GROWN, _MOVED = 3.0, 0.5
# Share of the KL of the hundredth of the tokens with the largest gaps, and factor of the KL's rise.
_FEW, _RISEN_BY_FEW = 0.5, 1.3
# Entropy as a share of its start.
_COLLAPSED = 0.15
# Mean |log p_engine - log p_learner| in nats, and its growth since it settled.
_GAP, _GAP_GROWN = 0.05, 4.0
# Number of pushes after which the updates of an adapter usually exceed the engines' precision.
_PUSHES, _LOST = 8, 0.5


def kl_rises(history: History, config: RolloutConfig) -> Diagnosis | None:
    """The reverse KL rises, from the start or after a fall, because the updates are too large."""
    kl = history.of("opd/reverse_kl", PATIENCE)
    gradient = history.of("train/grad_norm")
    entropy = history.of("train/entropy")
    if kl is None or gradient is None or entropy is None:
        return None
    first, lowest = kl.means[_BEGINNING - 1], kl.lowest()
    least, then = kl.means[lowest], kl.steps[lowest]
    grown = gradient.now / max(gradient.at(then), 1e-12)
    moved = entropy.now - entropy.at(then)
    above_its_start = kl.now > _RISEN * first
    with_a_cause = least < _FALLEN * first and (grown > _GROWN or abs(moved) > _MOVED)
    if kl.now <= _RISEN * least or not (above_its_start or with_a_cause):
        return None
    return Diagnosis(
        text=f"the reverse KL has risen to {kl.now:.3g}, from {first:.3g} at the start and "
        f"{least:.3g} at step {then} (means of {SPAN} steps; since then gradient norm x "
        f"{grown:.1f}, entropy {moved:+.2f} nats)",
        remedy="the updates are too large. Start another out= with a third of the lr, or with "
        f"larger steps (prompts_per_step){_less_noise(config)}",
    )


def _less_noise(config: RolloutConfig) -> str:
    """Further remedy, if another estimator has less noise; else empty."""
    if not config.objective.kl_coef or config.objective.estimator != "sampled":
        return ""
    return ", or with estimator=full or top_k, whose gradients have less noise"


def kl_on_few_tokens(history: History, config: RolloutConfig) -> Diagnosis | None:
    """The reverse KL rises, and a few tokens account for most of it."""
    share, kl = history.of("opd/kl_top_share", PATIENCE), history.of("opd/reverse_kl", PATIENCE)
    if share is None or kl is None:
        return None
    least = kl.means[kl.lowest()]
    if share.now < max(_FEW, share.start + 0.1) or kl.now <= _RISEN_BY_FEW * least:
        return None
    return Diagnosis(
        text=f"1% of the tokens account for {share.now:.0%} of the KL to the teacher "
        f"({share.start:.0%} at the start), and the reverse KL has risen from {least:.3g} to "
        f"{kl.now:.3g}",
        remedy="a few tokens dominate the updates. Read them (cluster.report, furthest apart); "
        "bound the KL of each token with kl_clip=5, or the updates with a lower max_grad_norm"
        f"{_less_noise(config)}",
    )


def entropy_collapses(history: History, config: RolloutConfig) -> Diagnosis | None:
    """The policy's entropy has collapsed, and neither KL nor reward has improved."""
    entropy = history.of("train/entropy", PATIENCE)
    if entropy is None or entropy.now >= _COLLAPSED * entropy.start:
        return None
    kl, reward = history.of("opd/reverse_kl", PATIENCE), history.of("reward/mean", PATIENCE)
    if kl is not None and kl.now < _FALLEN * kl.start:
        return None
    rewarded = config.objective.reward_coef > 0
    if rewarded and reward is not None and gained(reward) and not declined(reward):
        return None
    return Diagnosis(
        text=f"the entropy has fallen from {entropy.start:.3g} to {entropy.now:.3g} nats per "
        "token, but neither the KL nor the reward has improved",
        remedy="samples are nearly equal, so there is little left to learn from. Start another "
        "out= with a third of the lr, entropy_coef=0.001, or a higher temperature",
    )


def engine_gap_grows(history: History, config: RolloutConfig) -> Diagnosis | None:
    """The difference of the engines' and the learner's log-probs grows."""
    gap = history.of("train/logprob_gap", PATIENCE)
    if gap is None or gap.now <= max(_GAP, _GAP_GROWN * _settled(gap)):
        return None
    bound = "Lower"
    if config.objective.has_advantages:  # losses over ratios have something to weigh
        bound = "Bound the ratios with correction=truncate, lower"
    return Diagnosis(
        text=f"engines and learner differ by a mean of {gap.now:.3g} nats per token "
        f"(train/logprob_gap), {_settled(gap):.3g} at first",
        remedy=f"samples deviate more and more from the trained policy. {bound} "
        "max_staleness, or give the engines dtype=float32",
    )


def _settled(series: Series) -> float:
    """Running mean after the first steps, whose samples are not stale yet."""
    return series.means[min(2 * SPAN, len(series)) - 1]


def updates_are_lost(history: History, _config: RolloutConfig) -> Diagnosis | None:
    """Most of an adapter's updates do not reach the engines."""
    lost = history.of("push/lost_share", _PUSHES)
    if lost is None or lost.values[-1] <= _LOST:
        return None
    return Diagnosis(
        text=f"push/lost_share={lost.values[-1]:.2f} after {len(lost)} steps: the adapter's change "
        "is too small for the engines' precision, and most of it is rounded away",
        remedy="raise lr (1e-4 or more is usual for an adapter), or give the engines dtype=float32",
    )


def gained(reward: Series) -> bool:
    """True if the reward has exceeded its start by more than its noise."""
    return reward.means[reward.highest()] > reward.start + max(5 * reward.error, 1e-9)


def declined(reward: Series) -> bool:
    """True if the reward has fallen from its best value by more than its noise and by a fifth."""
    best = reward.means[reward.highest()]
    return best - reward.now > max(4 * reward.error, 0.2 * abs(best), 1e-9)
