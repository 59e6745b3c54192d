"""Judgement of a pair of models by its measurements: a verdict, warnings, and first settings.

Li et al. 2026 (arXiv 2604.13016) name two conditions for on-policy distillation: the models share
their likeliest tokens, and the teacher knows something that the student does not. `teacher_holds`
and `student_holds` measure the first condition, the reward on these prompts measures the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cluster.inspect.forecast.measure import TOP, PairMeasurements

Verdict = Literal["good", "same", "another style", "no better"]

# Models whose KL is below the first number, in nats per token, are the same. Models that share
# their likeliest tokens at fewer than the second share of positions differ in style.
_SAME_KL, _COMMON = 2e-3, 0.5
# Number of standard errors above which a difference is significant.
_ERRORS = 2.0
# Warn if the KL in the last quarter of responses exceeds that in the first by this factor and by
# this many nats.
_LATE, _LATE_BY = 3.0, 0.1
_MOST_CUT = 0.5
# Bounds of the suggested prompts per step; the upper one also replaces an unmeasurable noise scale.
_FEWEST, _MOST = 8, 1024
# Smallest group size in the docs' table of ranges.
_SMALL_GROUP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Comparison of the two checkpoints that needs no run of the models."""

    same_ends: bool
    same_template: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Verdict, warnings with remedies, and settings of a first run.

    Attributes:
        teacher_tokens, teacher_s: tokens that the teacher scores per step, and seconds for that.
    """

    verdict: Verdict
    warnings: list[str]
    prompts_per_step: int
    group_size: int
    lr: float
    teacher_tokens: float
    teacher_s: float


def judge(measured: PairMeasurements, pair: Pair, lr: float) -> Forecast:
    """Forecast a distillation. `lr` is the suggested learning rate."""
    verdict, warnings = _verdict(measured)
    warnings += _warnings(measured, pair)
    noise = measured.noise
    group_size = noise.best_group_size(measured.prompt_tokens / max(measured.student.tokens, 1.0))
    # If the fewest prompts are enough, larger groups only add cost.
    while group_size > _SMALL_GROUP and noise.prompts_for(group_size // 2) <= _FEWEST:
        group_size //= 2
    wanted = noise.prompts_for(group_size)
    if not math.isfinite(wanted) or wanted > _MOST:
        seen = noise.prompts * noise.group_size
        less = ", or estimator=full or top_k" if measured.noise_of == "sampled" else ""
        warnings.append(
            f"the gradient is smaller than its noise even with {seen} responses: use large steps"
            f"{less}; more prompts (eval.size=) give a better estimate"
        )
    if group_size > _SMALL_GROUP and noise.between < _ERRORS * noise.between_error:
        warnings.append(
            f"group_size={group_size} is uncertain: the gradient's noise between prompts is "
            f"{noise.between:.3g} with a standard error of {noise.between_error:.2g} (within a "
            f"prompt {noise.within:.3g}); more prompts (eval.size=) give a better estimate"
        )
    prompts = 2 ** math.ceil(math.log2(min(max(wanted, _FEWEST), _MOST)))
    seen_tokens = measured.student.tokens * noise.prompts * noise.group_size
    step_tokens = prompts * group_size * (measured.student.tokens + measured.prompt_tokens)
    per_token = measured.score_s / max(
        seen_tokens + measured.prompt_tokens * noise.prompts * noise.group_size, 1.0
    )
    return Forecast(
        verdict=verdict,
        warnings=warnings,
        prompts_per_step=prompts,
        group_size=group_size,
        lr=lr,
        teacher_tokens=step_tokens,
        teacher_s=step_tokens * per_token,
    )


def _verdict(measured: PairMeasurements) -> tuple[Verdict, list[str]]:
    if max(measured.reverse_kl, measured.forward_kl) < _SAME_KL:
        return "same", [
            f"teacher and student agree (KL {measured.reverse_kl:.1e} nats per token), so there is "
            "nothing to learn. Check that teacher= is the right checkpoint"
        ]
    if min(measured.teacher_holds, measured.student_holds) < _COMMON:
        return "another style", [
            f"the student's {TOP} likeliest tokens are also the teacher's at "
            f"{measured.teacher_holds:.0%} of positions, the teacher's also the student's at "
            f"{measured.student_holds:.0%}: the student hardly ever samples what the teacher "
            "would. Teach the student its style first: recipe=sft on the teacher's answers "
            "(python -m cluster.sample_to_sft)"
        ]
    gain, error = measured.reward_gain, measured.reward_gain_error or 0.0
    if gain is not None and gain <= _ERRORS * error:
        return "no better", [
            f"the teacher is not better on these prompts: reward {measured.teacher.reward:.3g} "
            f"against {measured.student.reward:.3g} ({gain:+.3g}, standard error {error:.2g}). "
            "It can teach only its style: use another teacher, harder prompts, or recipe=rl"
        ]
    return "good", []


def _warnings(measured: PairMeasurements, pair: Pair) -> list[str]:
    warnings = []
    if measured.reward_gain is None:
        warnings.append(
            "no prompt has an `answer`, so it is unknown whether the teacher is better on them"
        )
    if measured.teacher.cut_share > _MOST_CUT:
        warnings.append(
            f"{measured.teacher.cut_share:.0%} of the teacher's answers are cut off: raise "
            "max_new_tokens"
        )
    if measured.kl_late > max(_LATE * measured.kl_early, measured.kl_early + _LATE_BY):
        warnings.append(
            f"the KL is {measured.kl_early:.3g} nats in the first quarter of a response and "
            f"{measured.kl_late:.3g} in the last: the student's long responses lead to positions "
            "where the teacher's scores help little. Begin with a lower max_new_tokens"
        )
    if not pair.same_ends:
        warnings.append(
            "student and teacher have different end tokens: all of them end responses unless "
            "stop_tokens= is set (docs/objectives.md)"
        )
    if not pair.same_template:
        warnings.append(
            "student and teacher have different chat templates: the teacher is prompted with the "
            "student's (set chat_template= to use the teacher's for both)"
        )
    return warnings
