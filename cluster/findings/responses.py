"""Detectors of faults in the responses: length, repetition, ends, equal members."""

from __future__ import annotations

from cluster.config.on_policy import RolloutConfig
from cluster.findings.finding import Diagnosis
from cluster.findings.history import History
from cluster.findings.training import PATIENCE, gained

# Share of episodes that are cut off (of a game between two members, one seat of two), its growth,
# and the growth factor of lengths.
_CUT, _CUT_MORE, _LONGER = 0.5, 0.1, 2.0
# Share of groups with equal members.
_EQUAL = 0.5
# Share of sampled tokens that are repetitions, and its growth since the start.
_REPEATED, _REPEATED_MORE = 0.3, 0.2
# Share of episodes that ended by themselves at the start, and the fraction of it that remains.
_ENDED, _STILL_END = 0.3, 0.5


def responses_are_cut(history: History, config: RolloutConfig) -> Diagnosis | None:
    """At least half of the episodes end because one limit cuts them off."""
    tokens = f"max_new_tokens={config.sampling.max_new_tokens} or the context"
    limits = [("length", "max_new_tokens", tokens)]
    for reason, name in (("turns", "max_turns"), ("time", "time_s")):
        if hasattr(config.env, name):  # a custom environment may have limits of its own
            limits.append((reason, f"env.{name}", f"env.{name}={getattr(config.env, name)}"))
    for reason, setting, limit in limits:
        cut = history.of(f"rollout/stop/{reason}")
        if cut is not None and cut.values[-1] >= _CUT:
            return Diagnosis(
                text=f"{cut.values[-1]:.0%} of the episodes were cut off by {limit} "
                f"(rollout/stop/{reason})",
                remedy=f"raise {setting}, unless this is intended",
            )
    return None


def members_are_equal(history: History, _config: RolloutConfig) -> Diagnosis | None:
    """Members of most groups have the same tokens, which is improbable by their log-probs."""
    equal = history.of("rollout/equal_groups")
    if equal is None or equal.values[-1] <= _EQUAL:
        return None
    return Diagnosis(
        text=f"in {equal.values[-1]:.0%} of the groups all members have the same tokens, although "
        "they were sampled at a temperature above 0 (rollout/equal_groups)",
        remedy="the engine samples all members with one seed. Remove the flag from "
        "policy.server_flags= that makes SGLang deterministic, or use engine=embedded",
    )


def responses_grow(history: History, config: RolloutConfig) -> Diagnosis | None:
    """Responses become longer, but are cut off more often, or earn no higher reward."""
    length = history.of("rollout/response_length", PATIENCE)
    if length is None or length.now <= _LONGER * length.start:
        return None
    cut, reward = history.of("rollout/stop/length"), history.of("reward/mean", PATIENCE)
    cut_more = cut is not None and cut.now > _at_start(history, "rollout/stop/length") + _CUT_MORE
    for_nothing = config.objective.reward_coef > 0 and reward is not None and not gained(reward)
    if not (cut_more or for_nothing):
        return None
    why = "more of them are cut off" if cut_more else "the reward has not risen"
    return Diagnosis(
        text=f"responses have grown from {length.start:.3g} to {length.now:.3g} tokens, and {why}",
        remedy="read the kept responses. If they ramble, use a third of the lr, or "
        "reference_kl_coef=0.05 with reference=; if they need the length, raise max_new_tokens",
    )


def responses_repeat(history: History, config: RolloutConfig) -> Diagnosis | None:
    """Responses have begun to repeat themselves, which a teacher's scores do not correct."""
    repeated = history.of("rollout/repeated_share", PATIENCE)
    if repeated is None or repeated.now <= max(_REPEATED, repeated.start + _REPEATED_MORE):
        return None
    return Diagnosis(
        text=f"{repeated.now:.0%} of the sampled tokens repeat earlier text of the response "
        f"({repeated.start:.0%} at the start)",
        remedy=(
            "within a loop, a teacher also predicts the repetition, so its scores do not correct "
            "it. "
            if config.objective.kl_coef
            else ""
        )
        + "Start another out= with a third of the lr or a lower max_new_tokens, or constrain the "
        "policy with reference_kl_coef=0.05 and reference=",
    )


def eos_vanishes(history: History, config: RolloutConfig) -> Diagnosis | None:
    """Episodes end by themselves much less often than at the start."""
    ended = history.of("rollout/eos_share", PATIENCE)
    if ended is None or ended.start < _ENDED or ended.now >= _STILL_END * ended.start:
        return None
    if config.objective.kl_coef:
        cause, setting = "student and teacher may have different end tokens", "stop_tokens"
        answers = "the teacher's answers"
    else:
        setting = "reward" if config.env.judges else "env"
        cause, answers = "the reward may not punish answers without an end", "good answers"
    return Diagnosis(
        text=f"{ended.now:.0%} of the episodes end with a stop token, {ended.start:.0%} at the "
        "start",
        remedy=f"{cause} (set {setting}=), or {answers} exceed "
        f"max_new_tokens={config.sampling.max_new_tokens} (raise it)",
    )


def _at_start(history: History, name: str) -> float:
    """Value of a share at the start; 0 if the first steps do not have the metric."""
    series = history.of(name)
    if series is None or series.steps[0] > 1:
        return 0.0
    return series.start
