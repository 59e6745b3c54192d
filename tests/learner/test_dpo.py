"""Direct preference optimisation: its loss, its reference that is scored once, its resumed run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.data.held_out import HeldOut
from distill.errors import CheckpointError
from distill.objective.batching import TrainingRow
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.plan import Part
from learner.policy_loss import PreferenceLoss
from learner.supervised import RowStream, SupervisedLoop, with_reference
from tests.learner.conftest import (
    NewLearner,
    assert_same,
    gradients,
    gradients_of,
    naive_logprobs,
)
from tests.samples import answer_pair, demonstration

BETA = 0.3
NUM_PAIRS = 3


def pair(context: int, seed: int) -> list[TrainingRow]:
    return answer_pair(context, (3 + seed, 6), seed)


ROWS = [row for i in range(NUM_PAIRS) for row in pair(2 + 3 * i, 10 * i)]


class Scorer:
    """A reference that counts how often it is asked."""

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


NewLoop = Callable[..., SupervisedLoop]


@pytest.fixture
def new_loop(
    new_learner: NewLearner, tokenizer: PreTrainedTokenizerBase, store: CheckpointStore, path: Path
) -> NewLoop:
    """A loop over pairs as a recipe makes it: the reference is what the run started from.

    The token budget is below a pair: only what keeps pairs together keeps them.
    """

    def new(
        *, batch_size: int = NUM_PAIRS, resume_from: Checkpoint | None = None,
        held_out: Sequence[HeldOut] = (),
    ) -> SupervisedLoop:  # fmt: skip
        start = {"model": resume_from.model_dir} if resume_from else {}
        learner = new_learner(lr=3e-3, token_budget=1, **start)
        rows = with_reference(ROWS, path, learner.logprobs)
        return SupervisedLoop(
            learner=learner,
            tokenizer=tokenizer,
            stream=RowStream(rows, batch_size=batch_size, seed=0, rows_per_unit=2),
            loss=PreferenceLoss(beta=BETA),
            store=store,
            held_out=held_out,
            resume_from=resume_from,
        )

    return new


# The loss


@pytest.mark.parametrize(("budget", "sft_coef"), [(1, 0.0), (30, 0.5), (4096, 0.0), (4096, 2.0)])
def test_the_loss_and_its_gradient_against_naive_ones(
    new_learner: NewLearner,
    plain_model: PreTrainedModel,
    path: Path,
    budget: int,
    sft_coef: float,
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


def test_it_starts_at_log_2_and_learns_to_prefer(new_loop: NewLoop) -> None:
    loop = new_loop()
    first, *_, last = [loop.step() for _ in range(8)]
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["dpo/margin"] == pytest.approx(0, abs=1e-4)
    assert last["dpo/accuracy"] == pytest.approx(1) and last["train/loss"] < 0.2
    assert last["dpo/chosen_reward"] > last["dpo/rejected_reward"]


def test_held_out_pairs_have_their_own_loss_and_accuracy(
    new_loop: NewLoop, new_learner: NewLearner, path: Path
) -> None:
    """As a step of theirs alone would report, under the weights that have been trained since."""
    apart = with_reference(pair(4, 50) + pair(6, 60), path.with_name("apart.npz"), made_up)
    loop = new_loop(held_out=[HeldOut(name="pairs", rows_D=apart)])
    for _ in range(2):
        loop.step()
    evaluated = loop.evaluate()
    part = Part(rows_D=apart, loss=PreferenceLoss(beta=BETA), rows_per_unit=2)
    stepped = new_learner(model=loop.save().model_dir).step(part)
    names = {"validation/loss": "train/loss"} | {
        f"validation/{name}": f"dpo/{name}" for name in ("accuracy", "margin", "chosen_nll")
    }
    for name, same in names.items():
        assert evaluated[name] == pytest.approx(stepped[same], rel=1e-4, abs=1e-5), name


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


def test_a_run_that_ends_while_the_reference_scores_goes_on_behind_what_is_written(
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
    assert asked == [0, 1, 2, 3] and not path.exists()
    made = with_reference(ROWS, path, answer, rows_per_portion=2)
    assert asked[4:] == [2, 3, 4, 5]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    for row, expected_N in zip(made, expected, strict=True):
        assert row.reference_logprobs_T is not None
        np.testing.assert_array_equal(row.reference_logprobs_T[row.loss_mask_T], expected_N)
    path.unlink()
    np.savez(path.with_name(f".{path.stem}.partial.npz"), digest="others", logprobs=np.ones(3))
    with_reference(ROWS, path, reference := Scorer(made_up))
    assert reference.calls == 1


OTHER_ROWS = {
    "more": [*ROWS, *pair(4, 7)],
    "fewer": ROWS[:4],
    "another order": [*ROWS[2:], *ROWS[:2]],
    "another length": [*ROWS[:5], demonstration(8, 7, seed=5)],
    "other tokens": [*ROWS[:5], replace(ROWS[5], tokens_T=ROWS[5].tokens_T + 1)],
    "another mask": [
        *ROWS[:5],
        replace(ROWS[5], loss_mask_T=np.roll(ROWS[5].loss_mask_T, -1)),
    ],
}


@pytest.mark.parametrize("other", OTHER_ROWS)
def test_the_reference_of_other_rows_is_refused(path: Path, other: str) -> None:
    with_reference(ROWS, path, made_up)
    with pytest.raises(CheckpointError):
        with_reference(OTHER_ROWS[other], path, made_up)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    """One byte of the numbers changes."""
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
    path.unlink()  # what the message says to do
    assert len(with_reference(ROWS, path, reference)) == len(ROWS)
