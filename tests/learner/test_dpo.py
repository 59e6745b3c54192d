"""Direct preference optimisation: loss, reference log-probs that are kept, and resume."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from distill.errors import CheckpointError
from distill.objective.batching import TrainingRow
from learner.plan import Part
from learner.policy_loss import PreferenceLoss
from learner.supervised import with_reference
from tests.learner.conftest import NewLearner, assert_same, gradients, gradients_of, naive_logprobs
from tests.samples import answer_pair, demonstration

BETA = 0.3
NUM_PAIRS = 3


def pair(context: int, seed: int) -> list[TrainingRow]:
    return answer_pair(context, (3 + seed, 6), seed)


ROWS = [row for i in range(NUM_PAIRS) for row in pair(2 + 3 * i, 10 * i)]


class Scorer:
    """Reference that counts its calls."""

    def __init__(self, compute: Callable[[Sequence[TrainingRow]], list[np.ndarray]]) -> None:
        self.calls = 0
        self._compute = compute

    def __call__(self, rows_D: Sequence[TrainingRow]) -> list[np.ndarray]:
        self.calls += 1
        return self._compute(rows_D)


def made_up(rows_D: Sequence[TrainingRow]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [-rng.exponential(4, row.num_trained).astype(np.float32) for row in rows_D]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "reference.npz"


# The loss


@pytest.mark.parametrize(("budget", "sft_coef"), [(1, 0.0), (30, 0.5), (4096, 0.0), (4096, 2.0)])
def test_the_loss_and_its_gradient_against_naive_ones(
    new_learner: NewLearner, plain_model: PreTrainedModel, path: Path, budget: int, sft_coef: float
) -> None:
    rows = with_reference(ROWS, path, made_up)
    total, wins, rewards, nll = torch.zeros(()), 0, [], 0.0
    for i in range(0, len(rows), 2):
        reward = []
        for side, row in enumerate(rows[i : i + 2]):
            assert row.reference_logprobs_T is not None
            logprobs_N = naive_logprobs(plain_model, row)
            if side == 0:
                total = total - sft_coef * logprobs_N.mean() / NUM_PAIRS
                nll -= logprobs_N.mean().item() / NUM_PAIRS
            log_ratio = logprobs_N.sum()
            for t in range(len(row)):
                if row.loss_mask_T[t]:
                    log_ratio = log_ratio - float(row.reference_logprobs_T[t])
            reward.append(BETA * log_ratio)
        rewards.append([value.item() for value in reward])
        wins += reward[0].item() > reward[1].item()
        total = total - (1 / (1 + (reward[1] - reward[0]).exp())).log() / NUM_PAIRS
    total.backward()

    learner = new_learner(token_budget=budget)
    loss = PreferenceLoss(beta=BETA, sft_coef=sft_coef)
    metrics = learner.step(Part(rows_D=rows, loss=loss, rows_per_unit=2))
    assert_same(gradients(learner), gradients_of(plain_model), share=1e-4)
    assert metrics["dpo/chosen_nll"] == pytest.approx(nll, rel=1e-4)
    assert metrics["train/loss"] == pytest.approx(total.item(), rel=1e-4)
    assert metrics["dpo/accuracy"] == pytest.approx(wins / NUM_PAIRS)
    chosen, rejected = np.mean(rewards, axis=0)
    assert metrics["dpo/chosen_reward"] == pytest.approx(chosen, rel=1e-3)
    assert metrics["dpo/rejected_reward"] == pytest.approx(rejected, rel=1e-3)
    assert metrics["dpo/margin"] == pytest.approx(chosen - rejected, rel=1e-3, abs=1e-4)


# The reference


def test_the_reference_is_scored_once_and_kept(path: Path) -> None:
    reference = Scorer(made_up)
    made = with_reference(ROWS, path, reference)
    again = with_reference(ROWS, path, reference)
    assert reference.calls == 1 and [file.name for file in path.parent.iterdir()] == [path.name]
    for rows in (made, again):
        for row, plain, expected in zip(rows, ROWS, made_up(ROWS), strict=True):
            assert row.reference_logprobs_T is not None
            assert row.reference_logprobs_T[row.loss_mask_T].tolist() == expected.tolist()
            assert not row.reference_logprobs_T[~row.loss_mask_T].any()
            assert replace(row, reference_logprobs_T=None).tokens_T is plain.tokens_T


def test_interrupted_reference_scoring_continues_after_the_written_rows(
    path: Path,
) -> None:
    expected = made_up(ROWS)
    asked: list[int] = []

    def answer(rows_D: Sequence[TrainingRow]) -> list[np.ndarray]:
        asked.extend(next(i for i, r in enumerate(ROWS) if r is row) for row in rows_D)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return [expected[i] for i in asked[-len(rows_D) :]]

    with pytest.raises(KeyboardInterrupt):
        with_reference(ROWS, path, answer, rows_per_portion=2)
    assert asked == [0, 1, 2, 3]
    made = with_reference(ROWS, path, answer, rows_per_portion=2)
    assert asked[4:] == [2, 3, 4, 5]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    for row, expected_N in zip(made, expected, strict=True):
        assert row.reference_logprobs_T is not None
        np.testing.assert_array_equal(row.reference_logprobs_T[row.loss_mask_T], expected_N)


OTHER_ROWS = {
    "more": [*ROWS, *pair(4, 7)],
    "fewer": ROWS[:4],
    "another order": [*ROWS[2:], *ROWS[:2]],
    "another length": [*ROWS[:5], demonstration(8, 7, seed=5)],
    "other tokens": [*ROWS[:5], replace(ROWS[5], tokens_T=ROWS[5].tokens_T + 1)],
    "another mask": [*ROWS[:5], replace(ROWS[5], loss_mask_T=np.roll(ROWS[5].loss_mask_T, -1))],
}


@pytest.mark.parametrize("other", OTHER_ROWS)
def test_the_reference_of_other_rows_is_refused(path: Path, other: str) -> None:
    with_reference(ROWS, path, made_up)
    with pytest.raises(CheckpointError):
        with_reference(OTHER_ROWS[other], path, made_up)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    """Change one byte of the numbers."""
    at = data.index(made_up(ROWS)[1].tobytes())
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize(
    "harm", [cut, flip, lambda _: b"", lambda _: b"not numpy"], ids=["cut", "flip", "empty", "text"]
)
def test_a_corrupt_file_is_named(path: Path, harm: Callable[[bytes], bytes]) -> None:
    with_reference(ROWS, path, made_up)
    path.write_bytes(harm(path.read_bytes()))
    reference = Scorer(made_up)
    with pytest.raises(CheckpointError):
        with_reference(ROWS, path, reference)
    assert reference.calls == 0
    path.unlink()  # the remedy in the message
    assert len(with_reference(ROWS, path, reference)) == len(ROWS)
