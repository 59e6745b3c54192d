"""Training on data in a seeded order that a resumed run continues."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from distill.data.held_out import HeldOut
from distill.data.order import MixedPart
from distill.errors import CheckpointError
from distill.objective.batching import TrainingRow
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from learner.supervised import RowStream, SupervisedLoop
from tests.learner.conftest import NewLearner, NewSupervisedLoop, naive_logprobs, weights
from tests.samples import demonstration

# A row is known by how many tokens it trains, and a batch by their sum.
ROWS = [demonstration(2, trained, seed=trained) for trained in (1, 2, 4, 8, 16, 32)]


NewLoop = Callable[..., SupervisedLoop]


@pytest.fixture
def new_loop(new_supervised_loop: NewSupervisedLoop) -> NewLoop:
    """new_loop(rows, batch_size=, and the arguments of `new_supervised_loop`)."""

    def new(rows: list[TrainingRow] = ROWS, *, batch_size: int = 2, **given: Any) -> SupervisedLoop:
        stream = RowStream(rows, batch_size=batch_size, seed=0)
        return new_supervised_loop(stream, cross_entropy_loss, **given)

    return new


def test_the_first_loss_is_the_mean_negative_log_likelihood(
    new_loop: NewLoop, plain_model: PreTrainedModel
) -> None:
    metrics = new_loop(batch_size=len(ROWS)).step()
    with torch.no_grad():
        logprobs_N = torch.cat([naive_logprobs(plain_model, row) for row in ROWS])
    total, tokens = -logprobs_N.sum().item(), len(logprobs_N)
    assert metrics["train/loss"] == pytest.approx(total / tokens, rel=1e-4)
    assert metrics["train/nll"] == pytest.approx(metrics["train/loss"])
    assert (metrics["step"], metrics["train/tokens"]) == (1, tokens)
    assert metrics["tokens_per_s"] == pytest.approx(tokens / metrics["time/step"])


def test_held_out_rows_have_a_likelihood_per_token(
    new_loop: NewLoop, plain_model: PreTrainedModel
) -> None:
    loop = new_loop(ROWS[:3], held_out=[HeldOut(name="rows", rows_D=ROWS[3:])])
    evaluated = loop.evaluate()
    with torch.no_grad():
        logprobs_N = torch.cat([naive_logprobs(plain_model, row) for row in ROWS[3:]])
    assert evaluated["validation/nll"] == pytest.approx(-logprobs_N.mean().item(), rel=1e-4)
    assert evaluated["validation/loss"] == pytest.approx(evaluated["validation/nll"])
    plain = new_loop(ROWS[:3])
    assert loop.step()["train/loss"] == plain.step()["train/loss"]
    assert weights(loop.learner) == weights(plain.learner)
    assert loop.evaluate()["validation/nll"] != evaluated["validation/nll"]


def test_units_of_rows_are_drawn_whole() -> None:
    """A batch has `batch_size` units, an epoch every unit once, each in its own order."""
    stream = RowStream(ROWS, batch_size=2, seed=0, rows_per_unit=2)
    assert stream.num_units == 3
    batches = [[row.num_trained for row in stream.batch(i)] for i in range(3)]
    units = [tuple(batch[i : i + 2]) for batch in batches for i in (0, 2)]
    assert sorted(units[:3]) == sorted(units[3:]) == [(1, 2), (4, 8), (16, 32)]
    assert [[row.num_trained for row in stream.batch(i)] for i in (2, 0)] == [
        batches[2],
        batches[0],
    ]


def test_a_resumed_run_continues_the_order(new_loop: NewLoop) -> None:
    straight = new_loop()
    expected = [straight.step()["train/loss"] for _ in range(5)]
    loop = new_loop()
    losses = [loop.step()["train/loss"] for _ in range(2)]
    checkpoint = loop.save()
    assert (checkpoint.step, checkpoint.delivery) == (2, {"num_rows": 6})
    resumed = new_loop(resume_from=checkpoint)
    losses += [resumed.step()["train/loss"] for _ in range(3)]
    assert losses == expected and resumed.step_count == 5
    assert weights(resumed.learner) == weights(straight.learner)


def test_other_data_is_refused_on_resuming(new_loop: NewLoop) -> None:
    loop = new_loop()
    loop.step()
    with pytest.raises(CheckpointError):
        new_loop(ROWS[:5], resume_from=loop.save())


def test_each_source_has_a_likelihood_of_its_own(
    new_loop: NewLoop, new_learner: NewLearner, plain_model: PreTrainedModel
) -> None:
    """Per token of the source, over all micro-batches."""
    parts = [MixedPart(name="short", size=4), MixedPart(name="long", size=2, weight=2)]
    stream = RowStream(ROWS, batch_size=9, seed=0, parts=parts)
    drawn = stream.batch(0)
    metrics = new_learner(token_budget=40).step(Part(rows_D=drawn, loss=cross_entropy_loss))
    for name, rows in (("short", ROWS[:4]), ("long", ROWS[4:])):
        own = [row for row in drawn if row.data_source == name]
        assert {row.source for row in own} <= {row.source for row in rows} and own
        with torch.no_grad():
            logprobs_N = torch.cat([naive_logprobs(plain_model, row) for row in own])
        expected = pytest.approx(-logprobs_N.mean().item(), rel=1e-4)
        assert metrics[f"train/nll/source={name}"] == expected
    assert not any("source=" in name for name in new_loop(ROWS).step())
