"""The objectives, from top to bottom: terms per token, a divergence, a loss over ratios.

Everything is at the rollout temperature. p is the learner's policy, mu the policy that sampled, q
the teacher, ref the reference; r = p(y_t) / mu(y_t). S(x) is the sum of g^{s-t} x(y_s) over s >= t,
with g = kl_discount_factor; for g = 0 it is x(y_t). clip(x) clamps x to [-kl_clip, kl_clip].

    1  terms per token     A_t = reward_coef A_i + b_t                       rewards
                               + hint_bonus_coef [R_i right] (log q - log mu)    hinted tokens
                               + reference_kl_coef S(mean_kl - log p + log ref)
                               - kl_coef S(clip(log p - log q))              teacher: sampled
    2  divergence          D_t = kl_coef D(p || q)(y_<t)                     teacher: full, top_k
    3  loss over ratios    sum_t  -r A_t  (or a bounded form)  + D_t  - entropy_coef H(p)(y_<t)

    opd is 1 to 3 with a teacher, rl is 1 to 3 without a teacher; sft is `cross_entropy`, dpo is
    `dpo`. Groups that the teacher sampled have neither ratios nor advantages; their loss is
    `teacher_cross_entropy`.

Part 1 is numpy and is computed once per step, one trajectory at a time (`trajectory_terms`; A_i
comes from `reward_advantages`, the only module that compares several groups). Parts 2 and 3 are
torch and are computed for each micro-batch under the current weights: `teacher_divergence` within
the projection to the vocabulary, `policy_loss` on its outputs. The formulas are in `advantages`,
`divergences` and `losses` of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distill.models.logprobs import DivergenceOf, TokenStats
from distill.objective.advantages import (
    clipped,
    discounted_future_sum,
    on_actions,
    outside_top,
    reference_gaps,
    teacher_gaps,
)
from distill.objective.batching import Batch
from distill.objective.divergences import (
    clipped_reverse_kl,
    coarse,
    divergence,
    shared_columns,
    top_of_reverse_kl,
    with_tail,
    without_padding,
)
from distill.objective.group_rewards import GroupRewards
from distill.objective.losses import (
    SQUARES,
    Metrics,
    StepCounts,
    mismatch_weights,
    ratio_metrics,
    token_losses,
)
from distill.objective.reward_advantages import sample_advantages
from distill.objective.settings import (
    AUTO,
    CLIP,
    DEFAULT_JSD_BETA,
    Normalisation,
    ObjectiveConfig,
)
from distill.records import TrajectoryGroupMeta
from distill.types import FloatArray, Segment, Trajectory, TrajectoryGroup

# Maps a slice of a batch's trained tokens to log q_T over the vocabulary: (n, V), no gradient.
TeacherDistribution = Callable[[slice], Tensor]


# 1: terms per token.


class TokenTerms(NamedTuple):
    """Terms of the objective for a segment's tokens; arrays of shape (T,), 0 outside actions.

    Attributes:
        advantages_T: A_t, with the behaviour policy's log mu in place of log p.
        sampled_kl_coef_T: weight of -log p in `advantages_T`, summed over the terms of teacher and
            reference; None: `advantages_T` has no such term.
        teacher_coef: weight of the divergence from the teacher; 0: no divergence term.
        clipped_kl_coef_T: with kl_clip, the weight of the teacher's term, which is then not part of
            `sampled_kl_coef_T`; None without kl_clip.
        teacher_gaps_T: with kl_clip, log mu - log q of the sampled tokens, unclipped; None without
            kl_clip.
    """

    advantages_T: FloatArray
    sampled_kl_coef_T: FloatArray | None
    teacher_coef: float
    clipped_kl_coef_T: FloatArray | None = None
    teacher_gaps_T: FloatArray | None = None


def advantages_of(
    groups_P: Sequence[TrajectoryGroup] | Sequence[TrajectoryGroupMeta], objective: ObjectiveConfig
) -> list[FloatArray]:
    """A_i of each group's members (`sample_advantages`).

    Advantages are 0 in groups that the teacher sampled; these groups are not part of any baseline.
    """
    rewards_P = [GroupRewards.of(group) for group in groups_P]
    sampled = [of for of, group in zip(rewards_P, groups_P, strict=True) if not group.by_teacher]
    made = iter(sample_advantages(sampled, objective) if sampled else [])
    return [
        np.zeros(len(of.rewards_G), np.float32) if group.by_teacher else next(made)
        for of, group in zip(rewards_P, groups_P, strict=True)
    ]


def imitation_terms(trajectory: Trajectory, coef: float) -> list[TokenTerms]:
    """Terms of a trajectory that the teacher sampled: the weight of each token's cross-entropy."""
    return [
        TokenTerms(on_actions(s, np.full(s.num_actions, coef, np.float32)), None, 0.0)
        for s in trajectory.segments
    ]


def teacher_coef(
    teacher: str, objective: ObjectiveConfig, weights: Mapping[str, float] | None
) -> float:
    """kl_coef times the teacher's weight (1 without weights)."""
    if not objective.kl_coef or weights is None:
        return objective.kl_coef
    return objective.kl_coef * weights[teacher]


def trajectory_terms(
    trajectory: Trajectory,
    objective: ObjectiveConfig,
    *,
    advantage: float,
    coef: float,
    mean_kl: float,
    stop_event: tuple[int, ...] = (),
) -> list[TokenTerms]:
    """Terms of the objective for each segment of a trajectory.

    Args:
        advantage: the trajectory's advantage from `sample_advantages`.
        coef: weight of the trajectory's teacher, see `teacher_coef`.
        mean_kl: mean of log p_T - log ref_T over the step; unused without a reference.
        stop_event: tokens that count as one outcome (`distill.stops`).
    """
    terms = _teacher_terms(trajectory, objective, coef, stop_event)
    if objective.reference_kl_coef:
        terms = _with_reference(terms, trajectory, objective, mean_kl)
    rewards = [reward_terms(segment, advantage) for segment in trajectory.segments]
    is_right = trajectory.reward_counts and trajectory.reward >= objective.correct_threshold
    if objective.hint_bonus_coef and is_right:
        coef = objective.hint_bonus_coef
        hints = (hint_bonus(segment, coef) for segment in trajectory.segments)
        rewards = [reward_T + hint_T for reward_T, hint_T in zip(rewards, hints, strict=True)]
    return [
        term._replace(advantages_T=reward_T + term.advantages_T)
        for reward_T, term in zip(rewards, terms, strict=True)
    ]


def hint_bonus(segment: Segment, coef: float) -> FloatArray:
    """coef * (log q_T(y_t) - log mu_T(y_t)) on a segment's actions, q with the hint; shape (T,).

    The bonus is a reward of the token as sampled, so the loss does not replace log mu by log pi in
    it. All zeros if the segment has no hint.

    Raises:
        DataError: the segment has not been scored by a teacher.
    """
    if segment.teacher_context_T is None:
        return np.zeros(len(segment), np.float32)
    return on_actions(segment, np.float32(-coef) * teacher_gaps(segment))


def reward_terms(segment: Segment, advantage: float) -> FloatArray:
    """advantage + b_t on a segment's actions, with b_t the reward of the token; shape (T,)."""
    advantages_N = np.full(segment.num_actions, advantage, np.float32)
    if segment.bonuses_T is not None:
        advantages_N += segment.bonuses_T[segment.action_mask_T]
    return on_actions(segment, advantages_N)


def _with_reference(
    terms: Sequence[TokenTerms], trajectory: Trajectory, objective: ObjectiveConfig, mean_kl: float
) -> list[TokenTerms]:
    """Add the penalty of the reference, discounted to the trajectory's end, to the terms:

        A_t += reference_kl_coef * sum_{s >= t} g^{s-t} (mean_kl - kl_s)

    kl_t is log p_T - log ref_T of a token and `mean_kl` the mean of kl_t over the whole step. A
    centred penalty shifts probability between tokens and does not reward or punish length.
    """
    coef = np.float32(objective.reference_kl_coef)
    penalties = [mean_kl - reference_gaps(segment) for segment in trajectory.segments]
    summed = _to_the_end(penalties, objective.kl_discount_factor)
    made = []
    for segment, term, sum_N in zip(trajectory.segments, terms, summed, strict=True):
        coef_T = on_actions(segment, np.full(segment.num_actions, coef, np.float32))
        if term.sampled_kl_coef_T is not None:
            coef_T = coef_T + term.sampled_kl_coef_T
        advantages_T = term.advantages_T + on_actions(segment, coef * sum_N)
        made.append(term._replace(advantages_T=advantages_T, sampled_kl_coef_T=coef_T))
    return made


def _to_the_end(parts: Sequence[FloatArray], discount: float) -> list[FloatArray]:
    """Discounted future sums over the concatenated arrays, split into one array per input."""
    if not discount:
        return list(parts)
    ends = np.cumsum([len(part_N) for part_N in parts])[:-1]
    return np.split(discounted_future_sum(np.concatenate(parts), discount), ends)


def reference_gap_sum(segments: Sequence[Segment]) -> float:
    """Sum of log p_T - log ref_T over all action tokens of the segments; 0 without segments."""
    gaps = [reference_gaps(segment) for segment in segments]
    return float(np.concatenate(gaps).sum(dtype=np.float64)) if gaps else 0.0


def _teacher_terms(
    trajectory: Trajectory,
    objective: ObjectiveConfig,
    coef: float,
    stop_event: tuple[int, ...],
) -> list[TokenTerms]:
    """Terms of the teacher for each segment.

    estimator=sampled uses an advantage, other estimators use a divergence. With `samples_tail`, the
    divergence covers the tokens that the teacher was asked for, and the advantage the others.
    """
    assert objective.estimator != AUTO, "the run chooses an estimator before it trains"
    segments, clip = trajectory.segments, objective.kl_clip
    divergence_coef = 0.0 if objective.estimator == "sampled" else coef
    samples = objective.samples_tail or objective.estimator == "sampled"
    sampled_coef = coef if samples else 0.0
    if not coef or not (samples or clip):
        zeros = [np.zeros(len(segment), np.float32) for segment in segments]
        return [TokenTerms(zeros_T, None, divergence_coef) for zeros_T in zeros]
    terms = []
    sampled = opd_advantages(segments, sampled_coef, objective.kl_discount_factor, clip)
    for segment, advantages_T in zip(segments, sampled, strict=True):
        coefs_T = on_actions(segment, np.full(segment.num_actions, sampled_coef, np.float32))
        if objective.samples_tail:
            outside_T = outside_top(segment, stop_event)
            advantages_T = np.where(outside_T, advantages_T, 0)
            coefs_T = np.where(outside_T, coefs_T, 0)
        term = TokenTerms(advantages_T, coefs_T, divergence_coef)
        if clip is not None:
            gaps_T = on_actions(segment, teacher_gaps(segment))
            term = term._replace(
                sampled_kl_coef_T=None, clipped_kl_coef_T=coefs_T, teacher_gaps_T=gaps_T
            )
        terms.append(term)
    return terms


def opd_advantages(
    segments: Sequence[Segment],
    kl_coef: float,
    kl_discount_factor: float,
    kl_clip: float | None = None,
) -> list[FloatArray]:
    """A_t = -kl_coef * sum_{s >= t} g^{s-t} clip(log p_T(y_s) - log q_T(y_s)) on actions, else 0.

    Returns one array per segment; `segments` are those of one trajectory, and the sum goes to the
    trajectory's end. log p_T is the behaviour log-prob and log q_T the teacher's, both at the
    segment's temperature, so E[A_t] = -kl_coef * KL(p_T || q_T) for g = 0 without a clip. The loss
    replaces the behaviour policy's log p_T by the learner's (`own_advantages`).

    Raises:
        DataError: a segment has not been scored by a teacher.
    """
    gaps = [clipped(teacher_gaps(segment), kl_clip) for segment in segments]
    return [
        on_actions(segment, -kl_coef * sum_N)
        for segment, sum_N in zip(segments, _to_the_end(gaps, kl_discount_factor), strict=True)
    ]


# 2: the divergence, within the projection to the vocabulary.


def teacher_divergence(
    batch: Batch, how: ObjectiveConfig, distribution: TeacherDistribution | None
) -> DivergenceOf | None:
    """D(p_T || q_T) at each trained position of a batch; None with estimator=sampled.

    estimator=full: over the vocabulary, with the teacher's `distribution`. top_k: over the tokens
    that the teacher was asked for, and all others as one bucket. The reverse KL with top_k has no
    bucket: it is the part that falls on those tokens, and the sampled term completes it. The choice
    of these tokens may depend on the state in any way, but not on the token that is sampled there.
    With kl_clip each log ratio is bounded, like the log ratio of a sampled token.
    """
    if how.estimator == "sampled" or not how.kl_coef:
        return None
    jsd_beta = DEFAULT_JSD_BETA if how.jsd_beta is None else how.jsd_beta

    def of_whole(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
        if how.kl_clip is not None:
            return clipped_reverse_kl(log_p_NV, log_q_NV, how.kl_clip)
        return divergence(log_p_NV, log_q_NV, how.divergence, jsd_beta)

    if how.estimator == "full":
        assert distribution is not None, "estimator=full needs the teachers in the learner"
        return lambda log_p_NV, positions: of_whole(
            *shared_columns(log_p_NV, distribution(positions))
        )
    ids_NK, log_q_NK = batch.teacher_top_ids_NK, batch.teacher_top_logprobs_NK
    assert ids_NK is not None and log_q_NK is not None, "the rows lack the teacher's top_k"

    def of_top(log_p_NV: Tensor, positions: slice) -> Tensor:
        ids_nK = ids_NK[positions]
        log_q_nK = log_q_NK[positions]
        if how.samples_tail:
            return top_of_reverse_kl(log_p_NV, ids_nK, log_q_nK, how.kl_clip)
        log_q_nK = without_padding(log_p_NV.shape[1], ids_nK, log_q_nK)
        return of_whole(coarse(log_p_NV, ids_nK), with_tail(log_q_nK))

    return of_top


# 3: the loss over ratios.


def policy_loss(
    stats: TokenStats, batch: Batch, counts: StepCounts, how: ObjectiveConfig
) -> tuple[Tensor, Metrics]:
    """Policy loss minus the entropy bonus plus the divergence from the teacher.

    Args:
        stats: statistics under the learner's current weights; `divergence_N` is set if the
            objective has a divergence.
        batch: rows with the advantages of `trajectory_terms`, which contain the sampler's log p.

    Metrics: `train/ratio` and its extremes, against the server's log-probs; `train/logprob_gap`;
    `train/approx_kl_k1` to `k3`; the mean squared ratio, from which `finish_metrics` computes the
    effective sample size; `train/clip_share`, and by side if the loss bounds the ratio;
    `train/correction_share`; `train/entropy`; `opd/divergence` if the objective has one;
    `opd/clipped_share` with kl_clip.
    """
    logprobs_N, behaviour_N = stats.logprobs_N, batch.behaviour_logprobs_N
    weight_N, corrected_N = torch.ones_like(behaviour_N), None
    old_N = behaviour_N
    if how.correction != "none":
        # Before the first update of a step the learner's current weights are the proximal policy.
        proximal_N = batch.proximal_logprobs_N
        old_N = logprobs_N.detach() if proximal_N is None else proximal_N
        weight_N, corrected_N = mismatch_weights(old_N, behaviour_N, how)
    advantages_N = own_advantages(logprobs_N, batch, how)
    made = token_losses(
        logprobs_N, old_N, advantages_N, how, partial(mean_of_sequence, batch=batch)
    )
    scale_N = normaliser(batch, counts, how.normalisation)
    per_token_N = weight_N * made.loss_N
    if how.entropy_coef:
        per_token_N = per_token_N - how.entropy_coef * stats.entropy_N
    if stats.divergence_N is not None:
        per_token_N = per_token_N + batch.teacher_coef_N * stats.divergence_N
    metrics = ratio_metrics(logprobs_N.detach(), behaviour_N, counts)
    metrics["train/clip_share"] = made.side_N.abs().sum() / counts.tokens
    if how.loss in CLIP:
        metrics["train/clip_low_share"] = (made.side_N < 0).sum() / counts.tokens
        metrics["train/clip_high_share"] = (made.side_N > 0).sum() / counts.tokens
    metrics["train/entropy"] = stats.entropy_N.detach().sum() / counts.tokens
    if corrected_N is not None:
        metrics["train/correction_share"] = corrected_N.sum() / counts.tokens
    if stats.divergence_N is not None:
        metrics["opd/divergence"] = stats.divergence_N.detach().sum() / counts.tokens
    if how.kl_clip is not None:
        metrics["opd/clipped_share"] = _clipped(logprobs_N, batch, how.kl_clip) / counts.tokens
    return (scale_N * per_token_N).sum(), metrics


def own_advantages(logprobs_N: Tensor, batch: Batch, how: ObjectiveConfig) -> Tensor:
    """Advantages of a batch with the learner's log pi in place of the sampler's log mu.

        A_t - sum_{s >= t} g^{s-t} c_s d_s        with    d = log pi - log mu, no gradient

    c is the weight of the sampled terms of teacher and reference, g is `kl_discount_factor`, and
    the sum continues through the following rows of the sequence. With tokens sampled from mu and
    the ratio pi / mu, A = c (log q - log pi) has the gradient of -c KL(pi || q). With log mu in
    place of log pi the gradient would be that of -c (KL(pi || q) - KL(pi || mu)), which drives pi
    away from the policy that sampled. The mean that centres the term of the reference is a
    baseline, so it is not replaced: one value, computed from the samples, holds for the whole step.
    With kl_clip, d of the teacher's term is the change of the clipped gap.
    """
    advantages_N = batch.advantages_N.detach()
    if batch.sampled_kl_coef_N is None and batch.clipped_kl_coef_N is None:
        return advantages_N
    moved_N = (logprobs_N - batch.behaviour_logprobs_N).detach()
    moved_kl_N = torch.zeros_like(moved_N)
    if (coef_N := batch.sampled_kl_coef_N) is not None:
        moved_kl_N = coef_N.to(moved_N.dtype) * moved_N
    if (coef_N := batch.clipped_kl_coef_N) is not None:
        gap_N, clip = _teacher_gaps(batch), how.kl_clip
        moved_gap_N = clipped(gap_N + moved_N, clip) - clipped(gap_N, clip)
        moved_kl_N = moved_kl_N + coef_N.to(moved_N.dtype) * moved_gap_N
    after_B = batch.of_rows([row.other_rows.future_kl for row in batch.rows])
    return advantages_N - batch.future_sum(moved_kl_N, how.kl_discount_factor, after_B)


def _clipped(logprobs_N: Tensor, batch: Batch, kl_clip: float) -> Tensor:
    """Number of tokens whose log pi - log q exceeds the clip under the current weights."""
    moved_N = logprobs_N.detach() - batch.behaviour_logprobs_N
    return ((_teacher_gaps(batch) + moved_N).abs() > kl_clip).sum()


def _teacher_gaps(batch: Batch) -> Tensor:
    assert batch.teacher_gaps_N is not None, "kl_clip needs the teacher's log-probs in the rows"
    return batch.teacher_gaps_N


def mean_of_sequence(log_ratio_N: Tensor, batch: Batch) -> Tensor:
    """Mean log ratio of each token's whole sequence, shape (N,)."""
    others_B = batch.of_rows([row.other_rows.log_ratio for row in batch.rows])
    return ((batch.sum_by_row(log_ratio_N) + others_B) / batch.sequence_tokens())[batch.row_N]


def normaliser(batch: Batch, counts: StepCounts, how: Normalisation) -> Tensor:
    """Factor of each token's loss, shape (N,).

    token: 1 / (tokens of the step). sequence: 1 / (sequences of the step * tokens of the token's
    sequence).
    """
    if how == "token":
        return torch.ones_like(batch.advantages_N) / counts.tokens
    return 1 / (counts.sequences * batch.sequence_tokens()[batch.row_N])


# Loss of samples of the teacher.


def teacher_cross_entropy(
    logprobs_N: Tensor, batch: Batch, counts: StepCounts, how: Normalisation
) -> tuple[Tensor, Metrics]:
    """-sum_t w_t log p_T(y_t) over tokens that the teacher sampled at the same T, w = kl_coef.

    The mean over the teacher's samples is the cross-entropy of whole responses,
    E_{y ~ q_T} [-log p_T(y)] = KL(q_T || p_T) + H(q_T). The distribution of the samples does not
    depend on the policy, so the gradient is exactly that of the forward KL of sequences under any
    policy, and no ratio is needed. Weighting these tokens by p / q to obtain the reverse KL would
    give a variance that grows with the length without bound.

    Metrics, means over these tokens: `teacher_samples/nll`, and `teacher_samples/forward_kl`, the
    mean of log q_T - log p_T with the log q_T under which the teacher sampled. For samples received
    as text, log q_T is unknown and `teacher_samples/forward_kl` is meaningless
    (`distill.objective.metrics.without_unknown`).
    """
    assert logprobs_N.shape == batch.advantages_N.shape and logprobs_N.ndim == 1
    scale_N = normaliser(batch, counts, how)
    nll_N = -logprobs_N.detach()
    return -(scale_N * batch.advantages_N * logprobs_N).sum(), {
        "teacher_samples/nll": nll_N.sum() / counts.tokens,
        "teacher_samples/forward_kl": (batch.behaviour_logprobs_N + nll_N).sum() / counts.tokens,
    }


# Losses of recipes without rollouts.


def cross_entropy(
    logprobs_N: Tensor, weights_N: Tensor, counts: StepCounts
) -> tuple[Tensor, Metrics]:
    """-sum_t w_t log p(y_t) / tokens: the loss of plain supervised fine-tuning."""
    assert logprobs_N.shape == weights_N.shape and logprobs_N.ndim == 1
    loss = -(weights_N * logprobs_N).sum() / counts.tokens
    return loss, {"train/nll": -logprobs_N.detach().sum() / counts.tokens}


def bradley_terry(scores_D: Tensor, counts: StepCounts) -> tuple[Tensor, Metrics]:
    """-mean over pairs of log sigmoid(r(chosen) - r(rejected)).

    The negative log-likelihood of the preferences if P(a over b) = exp r_a / (exp r_a + exp r_b)
    (Bradley & Terry 1952); equation 1 of Ouyang et al. 2022 (InstructGPT) uses it as the loss of a
    reward model. Scores have shape (rows,): for each pair the score of the chosen response, then
    that of the rejected response.

    Metrics, over pairs: `reward_model/accuracy` (share of pairs whose chosen response has the
    higher score), `reward_model/margin`, and the mean and standard deviation of the scores of
    chosen and of rejected responses.
    """
    assert scores_D.ndim == 1 and len(scores_D) % 2 == 0
    pairs = counts.sequences // 2
    chosen_P, rejected_P = scores_D.view(-1, 2).unbind(dim=1)
    margin_P = chosen_P - rejected_P
    loss = -logsigmoid(margin_P).sum() / pairs
    means = {"accuracy": (margin_P > 0).float(), "margin": margin_P.detach()}
    for side, scores_P in (("chosen", chosen_P.detach()), ("rejected", rejected_P.detach())):
        means |= {f"{side}_mean": scores_P, f"{side}{SQUARES}": scores_P.square()}
    return loss, {
        f"reward_model/{name}": values_P.sum() / pairs for name, values_P in means.items()
    }


def dpo(
    logprobs_D: Tensor, reference_D: Tensor, counts: StepCounts, *, beta: float
) -> tuple[Tensor, Metrics]:
    """-mean over pairs of log sigmoid(beta ((log pi - log ref)(chosen) - (...)(rejected))).

    Rafailov et al. 2023. Log-probs are sums over a response's tokens, shape (rows,): for each pair
    the chosen response, then the rejected response.

    Metrics, means over pairs: `dpo/accuracy` (share of pairs whose chosen response has the higher
    implicit reward beta (log pi - log ref)), `dpo/margin`, `dpo/chosen_reward`,
    `dpo/rejected_reward`.
    """
    assert logprobs_D.shape == reference_D.shape and len(logprobs_D) % 2 == 0
    pairs = counts.sequences // 2
    chosen_P, rejected_P = (beta * (logprobs_D - reference_D)).view(-1, 2).unbind(dim=1)
    margin_P = chosen_P - rejected_P
    loss = -logsigmoid(margin_P).sum() / pairs
    means = {
        "dpo/accuracy": (margin_P > 0).float(),
        "dpo/margin": margin_P.detach(),
        "dpo/chosen_reward": chosen_P.detach(),
        "dpo/rejected_reward": rejected_P.detach(),
    }
    return loss, {name: values_P.sum() / pairs for name, values_P in means.items()}
