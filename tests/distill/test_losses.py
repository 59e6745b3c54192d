"""Losses and their gradients against loops, in float64, also of sequences over micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from distill.models.logprobs import TokenStats
from distill.objective.batching import TrainingRow, collate
from distill.objective.losses import StepCounts
from distill.objective.objectives import cross_entropy, policy_loss
from distill.objective.rows import policy_rows
from distill.objective.settings import CLIP, ObjectiveConfig
from distill.types import Segment, TrajectoryGroup
from tests.loss_twin import bounds, drawn, gradient_of, in_float64, twin, written_out
from tests.samples import segment, trajectory
from tests.sequences import with_other_rows

SEEDS = range(4)
LOSSES: dict[str, dict[str, Any]] = {
    "importance_sampling": {}, "ppo": {"loss": "ppo"},
    "ppo, wide above": {"loss": "ppo", "clip": (0.1, 0.5)}, "cispo": {"loss": "cispo"},
    "cispo, narrow": {"loss": "cispo", "clip": (0.3, 0.3)}, "dro": {"loss": "dro"},
    "gspo": {"loss": "gspo"}, "gspo, wide": {"loss": "gspo", "clip": (0.3, 0.2)},
}  # fmt: skip
NORMALISED: dict[str, dict[str, Any]] = {"token": {}, "sequence": {"normalisation": "sequence"}}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
every_normalisation = pytest.mark.parametrize("norm", NORMALISED.values(), ids=NORMALISED)


@pytest.mark.parametrize("seed", SEEDS)
@every_normalisation
@every_loss
def test_a_loss_and_its_gradient(loss: dict[str, Any], norm: dict[str, Any], seed: int) -> None:
    how = ObjectiveConfig(**loss, **norm, entropy_coef=0.3)
    made = drawn(seed, divergence=True)
    batch, stats, counts = made
    expected = written_out(how, made, batch.behaviour_logprobs_N.tolist())
    value, metrics = policy_loss(stats, batch, counts, how)
    assert value.item() == pytest.approx(expected.loss, rel=1e-9)
    assert gradient_of(value, stats.logprobs_N) == pytest.approx(expected.gradients, rel=1e-9)
    assert metrics["train/clip_share"].item() == pytest.approx(expected.clip_share)
    assert ("train/clip_low_share" in metrics) == (how.loss in CLIP)
    if how.loss in CLIP:
        low, high = (metrics[f"train/clip_{side}_share"].item() for side in ("low", "high"))
        assert low == pytest.approx(expected.clip_low_share)
        assert low + high == pytest.approx(expected.clip_share)
    assert metrics["opd/divergence"].item() == pytest.approx(
        sum(stats.divergence_N.tolist()) / counts.tokens  # pyright: ignore[reportOptionalMemberAccess]
    )


@pytest.mark.parametrize("name", [name for name in LOSSES if "ppo" in name or "cispo" in name])
def test_the_drawn_tokens_fall_on_all_sides_of_the_bounds(name: str) -> None:
    """Otherwise the test above would prove nothing."""
    how = ObjectiveConfig(**LOSSES[name])
    low, high = bounds(how)
    ratios = []
    for seed in SEEDS:
        batch, stats, _ = drawn(seed)
        gap_N = stats.logprobs_N.detach() - batch.behaviour_logprobs_N
        ratios += list(zip(gap_N.exp().tolist(), batch.advantages_N.tolist(), strict=True))
    assert any(low < ratio < high for ratio, _ in ratios)
    if name != "cispo":  # whose bounds are 0 and 5
        for sign in (1, -1):
            assert any(ratio < low and sign * A > 0 for ratio, A in ratios)
            assert any(ratio > high and sign * A > 0 for ratio, A in ratios)


@every_loss
def test_on_policy_every_loss_has_the_policy_gradient(loss: dict[str, Any]) -> None:
    how = ObjectiveConfig(**loss)
    batch, _, counts = drawn(3)
    logprobs_N = batch.behaviour_logprobs_N.clone().requires_grad_(True)
    stats = TokenStats(logprobs_N, torch.zeros_like(logprobs_N))
    value, metrics = policy_loss(stats, batch, counts, how)
    expected = (-batch.advantages_N / counts.tokens).tolist()
    assert gradient_of(value, logprobs_N) == pytest.approx(expected)
    assert metrics["train/clip_share"].item() == 0


@pytest.mark.parametrize("correction", ["none", "truncate", "mask"])
@every_loss
def test_only_the_learner_s_figures_have_gradients(loss: dict[str, Any], correction: Any) -> None:
    batch, stats, counts = drawn(0, divergence=True, proximal=True)
    names = ("advantages_N", "behaviour_logprobs_N", "proximal_logprobs_N")
    given = {name: getattr(batch, name).clone().requires_grad_(True) for name in names}
    how = ObjectiveConfig(**loss, correction=correction, entropy_coef=0.1)
    value, _ = policy_loss(stats, replace(batch, **given), counts, how)
    value.backward()
    assert all(tensor is not None and tensor.grad is not None for tensor in stats)
    assert all(tensor.grad is None for tensor in given.values())
    _, metrics = policy_loss(stats, batch, counts, how)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("proximal", [True, False])
@every_loss
def test_a_corrected_loss(loss: dict[str, Any], correction: Any, proximal: bool) -> None:
    """Ratios use the learner's own log-probs; learner to server is a separate weight."""
    cap = 1.5
    how = ObjectiveConfig(**loss, correction=correction, correction_cap=cap)
    made = drawn(2, proximal=True)
    if not proximal:  # the first update of a step: its own weights are the proximal ones
        made = made._replace(batch=replace(made.batch, proximal_logprobs_N=None))
    batch, stats, counts = made
    proximal_N = batch.proximal_logprobs_N
    old = (stats.logprobs_N if proximal_N is None else proximal_N).tolist()
    free = written_out(how, made, old)
    gradients, corrected = [], 0
    for n in range(len(old)):
        weight = math.exp(old[n] - batch.behaviour_logprobs_N[n].item())
        outside = weight > cap or (correction == "mask" and weight < 1 / cap)
        corrected += outside
        if outside:
            weight = cap if correction == "truncate" else 0.0
        gradients.append(weight * free.gradients[n])
    value, metrics = policy_loss(stats, batch, counts, how)
    assert gradient_of(value, stats.logprobs_N) == pytest.approx(gradients, rel=1e-9)
    assert 0 < corrected < len(old)
    assert metrics["train/correction_share"].item() == pytest.approx(corrected / counts.tokens)


@pytest.mark.parametrize("correction", ["none", "mask"])
@every_normalisation
@every_loss
def test_micro_batches_add_up(loss: dict[str, Any], norm: dict[str, Any], correction: Any) -> None:
    how = ObjectiveConfig(**loss, **norm, correction=correction, entropy_coef=0.1)
    batch, stats, counts = drawn(1, divergence=True, proximal=True)
    whole, metrics = policy_loss(stats, batch, counts, how)
    losses, parts = 0.0, []
    for rows, tokens in (([0], slice(0, 3)), ([1, 2], slice(3, 21))):
        part = replace(
            in_float64(collate([batch.rows[b] for b in rows])),
            teacher_coef_N=batch.teacher_coef_N[tokens],
        )
        share = TokenStats(*(values_N[tokens] for values_N in stats if values_N is not None))
        made, share_metrics = policy_loss(share, part, counts, how)
        losses += made.item()
        parts.append(share_metrics)
    assert losses == pytest.approx(whole.item(), rel=1e-12)
    for name, value in metrics.items():
        shares = [part[name].item() for part in parts]
        join = max if name.endswith("_max") else min if name.endswith("_min") else sum
        assert join(shares) == pytest.approx(value.item(), rel=1e-6), name


@pytest.mark.parametrize("seed", SEEDS)
def test_cross_entropy_written_out(seed: int) -> None:
    batch, stats, counts = drawn(seed)
    expected = nll = 0.0
    for n in range(len(batch.tokens_N)):
        expected -= batch.advantages_N[n].item() * stats.logprobs_N[n].item() / counts.tokens
        nll -= stats.logprobs_N[n].item() / counts.tokens
    value, metrics = cross_entropy(stats.logprobs_N, batch.advantages_N, counts)
    assert value.item() == pytest.approx(expected, rel=1e-9)
    assert metrics["train/nll"].item() == pytest.approx(nll)
    assert gradient_of(value, stats.logprobs_N) == pytest.approx(
        (-batch.advantages_N / counts.tokens).tolist()
    )


TURNS = [False, True, True, False, False, True, True, True]
# Sequences of three, one and two segments; untrained tokens between two turns of one.


def made(prompt: int, actions: int, seed: int, **changes: Any) -> Segment:
    reference_T = np.random.default_rng(seed).normal(-3, 1, prompt + actions).astype(np.float32)
    return segment(prompt, actions, seed=seed, reference_logprobs_T=reference_T, **changes)


GROUP = TrajectoryGroup(
    group_id=3,
    trajectories_G=(
        trajectory(
            made(3, 4, 1), made(1, 7, 2, action_mask_T=TURNS, versions_T=[0] * 8), made(2, 2, 3),
            reward=1.0,
        ),
        trajectory(made(4, 5, 4)),
        trajectory(made(2, 1, 5), made(5, 3, 6)),
    ),
)  # fmt: skip
SIZES = [[4, 5, 2], [5], [1, 3]]
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"normalisation": "sequence"},
    "discounted": {"kl_discount_factor": 0.8},
    "undiscounted, sequence": {"kl_discount_factor": 1.0, "normalisation": "sequence"},
    "reference": {"reference_kl_coef": 0.4},
    "reference, discounted": {"reference_kl_coef": 0.4, "kl_discount_factor": 0.8},
    "reference, discounted, beside a divergence": {
        "reference_kl_coef": 0.4, "kl_discount_factor": 0.8, "estimator": "full",
    },
    "clipped, discounted": {"kl_clip": 0.6, "kl_discount_factor": 0.8},
    "clipped, reference, discounted": {
        "kl_clip": 0.6, "reference_kl_coef": 0.4, "kl_discount_factor": 0.8,
    },
    "gspo": {"loss": "gspo", "clip": 0.1},
    "gspo, sequence, discounted": {
        "loss": "gspo", "clip": 10.0, "kl_discount_factor": 0.5,
        "normalisation": "sequence",
    },
    "gspo, corrected": {"loss": "gspo", "correction": "truncate", "kl_discount_factor": 0.5},
}  # fmt: skip


def proximal(rows_D: Sequence[TrainingRow]) -> list[TrainingRow]:
    rng = np.random.default_rng(5)
    return [
        replace(
            row,
            proximal_logprobs_T=row.behaviour_logprobs_T
            + rng.normal(0, 0.1, len(row)).astype(np.float32),
        )
        for row in rows_D
    ]


def present_logprobs(rows_D: Sequence[TrainingRow]) -> list[np.ndarray]:
    """The learner's log-probs, near the sampler's."""
    made = []
    for row in rows_D:
        rng = np.random.default_rng(int(row.tokens_T.sum()))
        behaviour_N = row.behaviour_logprobs_T[row.loss_mask_T]
        made.append(behaviour_N + rng.normal(0, 0.3, len(behaviour_N)).astype(np.float32))
    return made


def gradients(
    rows_D: Sequence[TrainingRow], how: ObjectiveConfig, counts: StepCounts
) -> tuple[float, list[float]]:
    """Loss, and gradient by the log-prob of each token, of one micro-batch."""
    logprobs_N = torch.from_numpy(np.concatenate(present_logprobs(rows_D))).requires_grad_(True)
    stats = TokenStats(logprobs_N, torch.zeros_like(logprobs_N))
    loss, _ = policy_loss(stats, collate(rows_D), counts, how)
    return loss.item(), gradient_of(loss, logprobs_N)


def sequences_written_out(
    rows_D: Sequence[TrainingRow], how: ObjectiveConfig, counts: StepCounts
) -> list[float]:
    """Gradients by sequence and token."""
    rows, gradients = iter(rows_D), []
    gaps = [
        (each.behaviour_logprobs_T - each.reference_logprobs_T)[each.action_mask_T]
        for each in GROUP.segments()
        if each.reference_logprobs_T is not None
    ]
    mean_kl = np.concatenate(gaps).mean()
    for member, sizes in zip(GROUP.trajectories_G, SIZES, strict=True):
        of_sequence = [next(rows) for _ in sizes]
        log_pi = np.concatenate(present_logprobs(of_sequence)).tolist()
        log_mu, log_old, log_q, log_ref = [], [], [], []
        for row, each in zip(of_sequence, member.segments, strict=True):
            mask_T = row.loss_mask_T
            log_mu += row.behaviour_logprobs_T[mask_T].tolist()
            corrected = how.correction != "none"
            proximal_T = row.proximal_logprobs_T if corrected else row.behaviour_logprobs_T
            given = proximal_T, each.teacher_logprobs_T, each.reference_logprobs_T
            for column, values_T in zip((log_old, log_q, log_ref), given, strict=True):
                assert values_T is not None
                column += values_T[mask_T].tolist()
        ratio = math.exp(sum(np.subtract(log_pi, log_old)) / sum(sizes))
        for t in range(sum(sizes)):
            A = how.reward_coef * (member.reward - 1 / 3)
            for s in range(t, sum(sizes)):
                discount = how.kl_discount_factor ** (s - t)
                if how.estimator == "sampled":
                    clip = how.kl_clip or math.inf
                    A -= how.kl_coef * discount * min(max(log_pi[s] - log_q[s], -clip), clip)
                A += how.reference_kl_coef * discount * (mean_kl - (log_pi[s] - log_ref[s]))
            scale = 1 / counts.tokens
            if how.normalisation == "sequence":
                scale = 1 / (len(SIZES) * sum(sizes))
            weight = 1.0
            if how.correction == "truncate":
                weight = min(2.0, math.exp(log_old[t] - log_mu[t]))
            gradients.append(scale * weight * twin(how, log_pi[t], log_old[t], A, ratio).gradient)
    return gradients


@pytest.mark.parametrize("settings", HOW.values(), ids=HOW)
def test_a_sequence_is_one_wherever_its_rows_are(settings: dict[str, Any]) -> None:
    how = ObjectiveConfig(**settings, kl_coef=0.7, reward_coef=2.0)
    bare = policy_rows([GROUP], how)
    if how.correction != "none":
        bare = proximal(bare)
    rows = with_other_rows(bare, how, present_logprobs)
    counts = StepCounts(sum(map(sum, SIZES)), sum(row.ends_sequence for row in rows))
    assert counts == (20, 3)
    loss, made = gradients(rows, how, counts)
    assert made == pytest.approx(sequences_written_out(rows, how, counts), rel=1e-4, abs=1e-6)
    order = [4, 2, 0, 5, 1, 3]
    apart = {i: gradients([rows[i]], how, counts) for i in order}
    assert sum(loss for loss, _ in apart.values()) == pytest.approx(loss, rel=1e-5)
    assert [g for i in range(6) for g in apart[i][1]] == pytest.approx(made, rel=1e-5, abs=1e-7)
