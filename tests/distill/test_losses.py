"""Losses and their gradients against loops, in float64."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from distill.models.logprobs import TokenStats
from distill.objective.batching import collate
from distill.objective.objectives import cross_entropy, policy_loss
from distill.objective.settings import CLIP, ObjectiveConfig
from tests.loss_twin import bounds, drawn, gradient_of, in_float64, written_out

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
def test_the_loss_and_its_gradient_written_out(
    loss: dict[str, Any], norm: dict[str, Any], seed: int
) -> None:
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
def test_only_the_learner_s_own_figures_carry_a_gradient(
    loss: dict[str, Any], correction: Any
) -> None:
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
def test_a_corrected_loss_written_out(
    loss: dict[str, Any], correction: Any, proximal: bool
) -> None:
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
def test_micro_batches_add_up_to_the_batch(
    loss: dict[str, Any], norm: dict[str, Any], correction: Any
) -> None:
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
