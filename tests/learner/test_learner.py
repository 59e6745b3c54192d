"""The optimizer step: gradient, accumulation, update and refusals."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.errors import CheckpointError, NonFiniteError
from distill.objective.batching import TrainingRow, split_by_token_budget
from distill.objective.settings import CORRECTION_CAP, ObjectiveConfig
from learner.config import LearnerSettings, Schedule
from learner.learner import Learner
from learner.optimizer import lr_factor, read_trainer, write_trainer
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss
from tests.conftest import TinyPair
from tests.families import family_dir
from tests.learner.conftest import (
    IMPORTANCE_SAMPLING,
    NewLearner,
    assert_same,
    gradients,
    naive_distribution,
    near_policy,
    trained,
    weights,
)
from tests.samples import training_row

ROWS = [training_row(2 + i, 3 + 2 * i, seed=i, temperature=0.5 + 0.3 * i) for i in range(6)]


def step(learner: Learner, rows: list[TrainingRow]) -> dict[str, float]:
    return learner.step(Part(rows_D=rows, loss=IMPORTANCE_SAMPLING))


def test_each_pass_of_a_step_is_progress(new_learner: NewLearner) -> None:
    learner = new_learner(token_budget=1)  # a row a micro-batch
    step(learner, ROWS)
    assert learner.progress.count == 2 * len(ROWS) + 1, "forward, backward, the step itself"
    learner.logprobs(ROWS)
    assert learner.progress.count == 3 * len(ROWS) + 2


def test_metrics_are_means_per_trained_token(
    new_learner: NewLearner, plain_model: PreTrainedModel
) -> None:
    """All metrics of `policy_loss`, over many micro-batches, against numpy."""
    how = ObjectiveConfig(loss="ppo", clip=(0.5, 1.0), correction="truncate")
    learner = new_learner(token_budget=30)
    rows = near_policy(learner, ROWS)
    logprobs_N = np.concatenate(learner.logprobs(rows)).astype(np.float64)
    with torch.no_grad():
        log_p_NV = torch.cat([naive_distribution(plain_model, row) for row in rows])
    behaviour_N, proximal_N, advantages_N = (
        trained(rows, name)
        for name in ("behaviour_logprobs_T", "proximal_logprobs_T", "advantages_T")
    )
    log_ratio_N = logprobs_N - behaviour_N
    ratio_N, tokens = np.exp(log_ratio_N), len(log_ratio_N)
    expected = {
        "train/ratio": ratio_N.mean(),
        "train/ratio_max": ratio_N.max(),
        "train/ratio_min": ratio_N.min(),
        "train/logprob_gap": np.abs(log_ratio_N).mean(),
        "train/approx_kl_k1": -log_ratio_N.mean(),
        "train/approx_kl_k2": np.square(log_ratio_N).mean() / 2,
        "train/approx_kl_k3": (ratio_N - 1 - log_ratio_N).mean(),
        "train/ess": ratio_N.sum() ** 2 / (tokens * np.square(ratio_N).sum()),
        "train/entropy": -(log_p_NV.exp() * log_p_NV).sum(dim=1).mean().item(),
        "train/correction_share": (np.exp(proximal_N - behaviour_N) > CORRECTION_CAP).mean(),
        "train/tokens": sum(row.num_trained for row in rows),
        "train/lr": 1e-2,
    }
    moved_N = np.exp(logprobs_N - proximal_N)
    clipped_N = np.where(advantages_N > 0, moved_N > 2, (moved_N < 0.5) | (moved_N > 3))
    expected["train/clip_share"] = clipped_N.mean()
    expected["train/clip_low_share"] = (clipped_N & (moved_N < 1)).mean()
    expected["train/clip_high_share"] = (clipped_N & (moved_N > 1)).mean()
    assert 0 < expected["train/clip_share"] < 1 and 0 < expected["train/correction_share"] < 1

    metrics = learner.step(Part(rows_D=rows, loss=PolicyObjectiveLoss(objective=how)))
    norms = [g.double().norm().item() for g in gradients(learner).values()]
    padded = sum(len(b) * max(map(len, b)) for b in split_by_token_budget(rows, 30))
    expected["train/grad_norm"] = math.hypot(*norms)
    expected["train/padding_share"] = 1 - sum(map(len, rows)) / padded
    seconds = {"time/forward", "time/backward", "time/optimizer"}
    assert metrics.keys() == expected.keys() | seconds | {"train/loss", "train/tflops_per_s"}
    assert all(metrics[name] > 0 for name in (*seconds, "train/tflops_per_s"))
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def modes(learner: Learner) -> list[bool]:
    return [module.training for module in learner.model.modules()]


def test_logprobs_come_in_the_order_asked_and_change_nothing(new_learner: NewLearner) -> None:
    learner = new_learner(token_budget=20)
    before, training = weights(learner), modes(learner)
    alone = [learner.logprobs([row])[0] for row in ROWS]
    order = [5, 0, 3, 1, 4, 2, 0]
    for i, came in zip(order, learner.logprobs([ROWS[i] for i in order]), strict=True):
        assert came.tolist() == pytest.approx(alone[i].tolist(), abs=1e-4)
    assert weights(learner) == before and modes(learner) == training


def test_clipping_keeps_the_direction(new_learner: NewLearner) -> None:
    free, clipped = new_learner(), new_learner(max_grad_norm=0.01)
    norm = step(free, ROWS)["train/grad_norm"]
    assert step(clipped, ROWS)["train/grad_norm"] == norm > 0.01
    expected = {name: 0.01 / norm * grad for name, grad in gradients(free).items()}
    assert_same(gradients(clipped), expected, share=1e-4)
    total = math.hypot(*[g.norm().item() for g in gradients(clipped).values()])
    assert total == pytest.approx(0.01, rel=1e-4)


def test_the_update_is_adamw_with_decay_of_matrices_only(new_learner: NewLearner) -> None:
    """Loshchilov & Hutter 2019, algorithm 2, in float64, with a warm-up and a linear schedule."""
    learner = new_learner(
        lr=1e-3, weight_decay=0.1, lr_schedule="linear", warmup_steps=2, total_steps=4,
        adam_beta1=0.8, adam_beta2=0.98,
    )  # fmt: skip
    expected = {name: p.detach().double() for name, p in learner.model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    assert {p.ndim for p in expected.values()} == {1, 2}
    for number, share in enumerate([0.5, 1.0, 1.0, 0.5], start=1):
        rate = 1e-3 * share
        assert step(learner, ROWS)["train/lr"] == pytest.approx(rate)
        for name, gradient in gradients(learner).items():
            gradient = gradient.double()
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.98 * second[name] + 0.02 * gradient**2
            if expected[name].ndim == 2:
                expected[name] = expected[name] * (1 - rate * 0.1)
            scale = (second[name] / (1 - 0.98**number)).sqrt() + 1e-8
            expected[name] = expected[name] - rate * first[name] / (1 - 0.8**number) / scale
    for name, parameter in learner.model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=0, atol=1e-5)


def test_biases_of_experts_are_not_decayed(tmp_path: Path, new_learner: NewLearner) -> None:
    """GPT-OSS stores those of a layer in one matrix, one row per expert."""
    learner = new_learner(model=family_dir(tmp_path, "gpt_oss"), weight_decay=0.5)
    groups = learner.worker.optimizer.param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in learner.model.named_parameters():
        is_matrix = parameter.ndim > 1 and not name.endswith("_bias")
        assert (id(parameter) in decayed) == is_matrix, name


@pytest.mark.parametrize(
    ("schedule", "warmup", "factors"),
    [
        ("constant", 0, [1, 1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25, 0, 0]),
        ("linear", 2, [0.5, 1, 1, 0.5, 0, 0]),
        ("cosine", 0, [1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0, 0]),
        ("cosine", 4, [0.25, 0.5, 0.75, 1, 1]),
        ("linear", 9, [1 / 9, 2 / 9, 3 / 9, 4 / 9]),
    ],
)
def test_the_schedule_over_four_steps(
    schedule: Schedule, warmup: int, factors: list[float]
) -> None:
    config = LearnerSettings(lr_schedule=schedule, warmup_steps=warmup)
    made = [lr_factor(step, config, 4) for step in range(len(factors))]
    assert made == pytest.approx(factors)


def poisoned(row: TrainingRow, weight: float, behaviour: float) -> TrainingRow:
    return replace(
        row,
        advantages_T=np.full(len(row), weight, np.float32),
        behaviour_logprobs_T=np.full(len(row), behaviour, np.float32),
    )


def reloaded(error: NonFiniteError) -> list[TrainingRow]:
    path = str(error).split("rows are in ")[1].split(" (numpy.load")[0]
    with np.load(path) as arrays:
        count = len({name.split("/")[0] for name in arrays})
        return [
            TrainingRow(
                **{
                    name: arrays[f"row{i}/{name}"]
                    for name in ("tokens_T", "loss_mask_T", "advantages_T", "behaviour_logprobs_T")
                },
                temperature=float(arrays[f"row{i}/temperature"]),
                source=str(arrays[f"row{i}/source"]),
            )
            for i in range(count)
        ]


@pytest.mark.parametrize(
    ("weight", "behaviour", "dumped"),
    [
        (1.0, -200.0, 1),  # one row a micro-batch: the offender alone
        (1e25, -1.0, 6),
    ],
)
def test_infinities_stop_before_the_weights(
    new_learner: NewLearner, weight: float, behaviour: float, dumped: int
) -> None:
    learner, fresh = new_learner(token_budget=1), new_learner(token_budget=1)
    before = weights(learner)
    rows = [*ROWS[:5], poisoned(ROWS[5], weight, behaviour)]
    with pytest.raises(NonFiniteError) as error:
        step(learner, rows)
    assert weights(learner) == before

    came = reloaded(error.value)
    assert len(came) == dumped
    for row, expected in zip(came, rows[-dumped:], strict=True):
        assert (row.temperature, row.source) == (expected.temperature, expected.source)
        for name in ("tokens_T", "loss_mask_T", "advantages_T", "behaviour_logprobs_T"):
            np.testing.assert_array_equal(getattr(row, name), getattr(expected, name))

    step(learner, ROWS)  # the failed step left nothing behind
    step(fresh, ROWS)
    assert weights(learner) == weights(fresh)


@pytest.mark.parametrize("change", ["model", "missing", "rng"])
def test_a_state_of_another_model_is_refused(
    new_learner: NewLearner,
    tiny_pair: TinyPair,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    change: str,
) -> None:
    learner = new_learner(model=tiny_pair.teacher if change == "model" else tiny_pair.student)
    step(learner, ROWS)
    learner.save(tmp_path, tokenizer)
    if change == "missing":
        (tmp_path / "trainer.json").write_text('{"rng": []}')
    elif change == "rng":
        spoilt = [{"cpu": torch.zeros(3, dtype=torch.uint8)}]
        write_trainer(tmp_path, replace(read_trainer(tmp_path), rng=spoilt))
    with pytest.raises(CheckpointError):
        new_learner().load_trainer_state(tmp_path)
