"""Supervised fine-tuning: it learns, in a seeded order that a resumed run continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.batching import TrainingRow
from distill.errors import CheckpointError
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.sft import SftLoop
from tests.conftest import TinyPair
from tests.learner.conftest import NewLearner
from tests.samples import training_row


def supervised(trained: int) -> TrainingRow:
    """A row known by how many tokens it trains."""
    row = training_row(2, trained, seed=trained, temperature=1.0)
    return replace(
        row,
        weights_T=row.loss_mask_T.astype(np.float32),
        behaviour_logprobs_T=np.zeros(len(row), np.float32),
    )


ROWS = [supervised(trained) for trained in (1, 2, 4, 8, 16, 32)]  # a batch's sum tells its rows


@pytest.fixture
def new_loop(new_learner: NewLearner, tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    def new(
        rows: list[TrainingRow] = ROWS,
        *,
        batch_size: int = 2,
        seed: int = 0,
        resume_from: Checkpoint | None = None,
        **optimizer: object,
    ) -> SftLoop:
        start = {"model": resume_from.model_dir} if resume_from else {}
        return SftLoop(
            learner=new_learner(**start, **optimizer),
            tokenizer=tokenizer,
            rows_D=rows,
            batch_size=batch_size,
            seed=seed,
            store=CheckpointStore(tmp_path / "checkpoints", keep=1),
            resume_from=resume_from,
        )

    return new


def rows_seen(loop: SftLoop, steps: int) -> list[int]:
    return [int(loop.step()["train/tokens"]) for _ in range(steps)]


def test_the_first_loss_is_the_mean_negative_log_likelihood(new_loop, tiny_pair: TinyPair) -> None:
    metrics = new_loop(batch_size=len(ROWS)).step()
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.student, dtype=torch.float32)
    total, tokens = 0.0, 0
    for row in ROWS:
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([row.tokens_T.tolist()])).logits[0]
        for t in np.flatnonzero(row.loss_mask_T):
            total -= torch.log_softmax(logits_TV[t - 1], 0)[row.tokens_T[t]].item()
            tokens += 1
    assert metrics["train/loss"] == pytest.approx(total / tokens, rel=1e-4)
    assert metrics["train/nll"] == pytest.approx(metrics["train/loss"])
    assert (metrics["step"], metrics["train/tokens"]) == (1, tokens)
    assert metrics["tokens_per_s"] == pytest.approx(tokens / metrics["time/step"])


def test_it_learns_its_rows_by_heart(new_loop) -> None:
    loop = new_loop(ROWS[2:5], batch_size=3, lr=1e-2, max_grad_norm=1.0)
    losses = [loop.step()["train/loss"] for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]


def test_every_epoch_sees_every_row_once(new_loop) -> None:
    loop = new_loop(batch_size=1)
    epochs = [rows_seen(loop, 6) for _ in range(3)]
    assert all(sorted(epoch) == [1, 2, 4, 8, 16, 32] for epoch in epochs)
    assert epochs[0] != epochs[1] and rows_seen(new_loop(batch_size=1, seed=1), 6) != epochs[0]


def test_a_batch_may_span_epochs(new_loop) -> None:
    one_by_one = rows_seen(new_loop(batch_size=1), 12)
    assert rows_seen(new_loop(batch_size=4), 3) == [
        sum(one_by_one[i : i + 4]) for i in range(0, 12, 4)
    ]


def test_a_resumed_run_goes_on_where_it_was(new_loop) -> None:
    straight = new_loop()
    expected = [straight.step()["train/loss"] for _ in range(5)]
    loop = new_loop()
    losses = [loop.step()["train/loss"] for _ in range(2)]
    checkpoint = loop.save()
    assert (checkpoint.step, checkpoint.delivery) == (2, {"num_rows": 6})
    resumed = new_loop(resume_from=checkpoint)
    losses += [resumed.step()["train/loss"] for _ in range(3)]
    assert losses == expected and resumed.step_count == 5


def test_other_data_is_refused_on_resuming(new_loop) -> None:
    loop = new_loop()
    loop.step()
    with pytest.raises(CheckpointError, match="trained on 6 rows, the data now has 5"):
        new_loop(ROWS[:5], resume_from=loop.save())
