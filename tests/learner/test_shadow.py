"""A lagged or averaged teacher against its formula: saved, resumed, read and pushed."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.errors import CheckpointError
from distill.objective.settings import ObjectiveConfig
from distill.records import TrainedGroups
from distill.weights.model_weights import Weights
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.config import ShadowRule
from learner.learner import Learner
from learner.plan import Part
from tests.learner.conftest import (
    IMPORTANCE_SAMPLING,
    NewLearner,
    NewLoop,
    World,
    adjusted,
    weights,
)
from tests.samples import group, training_row

EVERY, EMA = ShadowRule(every=3), ShadowRule(ema=0.8)


def train(learner: Learner, first: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """Trained weights after each step."""
    made = []
    for step in range(first, first + steps):
        rows = [training_row(2, 4, seed=step), training_row(3, 5, seed=step + 1)]
        learner.step(Part(rows_D=rows, loss=IMPORTANCE_SAMPLING))
        learner.follow(step + 1)
        made.append(adjusted(learner))
    return made


def teacher(learner: Learner) -> dict[str, torch.Tensor]:
    before = adjusted(learner)
    with learner.as_teacher():
        shown = adjusted(learner)
    assert equal(adjusted(learner), before), "the weights did not come back as they were"
    return shown


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def saved(learner: Learner, root: Path, tokenizer: PreTrainedTokenizerBase) -> Checkpoint:
    write = partial(learner.save, tokenizer=tokenizer)
    return CheckpointStore(root, keep=1).save(step=5, write=write, delivery={})


@pytest.mark.parametrize("adapter", [{}, {"lora_rank": 2}], ids=["all", "adapter"])
def test_an_average_is_that_of_its_formula(new_learner: NewLearner, adapter: dict) -> None:
    learner = new_learner(shadow=EMA, **adapter)
    versions = [adjusted(learner), *train(learner, 0, 6)]
    shown = teacher(learner)
    for name in versions[0]:
        expected = 0.8**6 * versions[0][name].double()
        for i in range(1, 7):
            expected += 0.2 * 0.8 ** (6 - i) * versions[i][name].double()
        torch.testing.assert_close(shown[name].double(), expected, atol=1e-6, rtol=1e-5)
    assert not equal(shown, versions[-1])


def test_a_teacher_that_lags_is_an_earlier_student_bit_by_bit(new_learner: NewLearner) -> None:
    learner = new_learner(shadow=EVERY)
    versions = [adjusted(learner)]
    ages = []
    for step in range(7):
        versions += train(learner, step, 1)
        shown = teacher(learner)
        ages.append(step + 1 - EVERY.version(step + 1))
        assert equal(shown, versions[step + 1 - ages[-1]])
    assert ages == [1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("rule", [EVERY, EMA], ids=["lag", "ema"])
@pytest.mark.parametrize("adapter", [{}, {"lora_rank": 2}], ids=["all", "adapter"])
def test_a_resumed_teacher_continues_bit_for_bit(
    new_learner: NewLearner,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    rule: ShadowRule,
    adapter: dict,
) -> None:
    learner = new_learner(shadow=rule, **adapter)
    train(learner, 0, 5)
    checkpoint = saved(learner, tmp_path / "run", tokenizer)
    at_five = teacher(learner)
    train(learner, 5, 2)
    start = {"lora_adapter": checkpoint.adapter_dir} if adapter else {"model": checkpoint.model_dir}
    again = new_learner(shadow=rule, **start)
    again.load_trainer_state(checkpoint.path)
    assert equal(teacher(again), at_five)
    train(again, 5, 2)
    assert equal(adjusted(again), adjusted(learner)) and equal(teacher(again), teacher(learner))


def test_runs_without_such_a_teacher_ignore_its_files(
    new_learner: NewLearner, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    followed = new_learner(shadow=EMA)
    train(followed, 0, 2)
    checkpoint = saved(followed, tmp_path / "followed", tokenizer)
    plain = new_learner(model=checkpoint.model_dir)
    plain.load_trainer_state(checkpoint.path)
    without = saved(plain, tmp_path / "plain", tokenizer)
    with pytest.raises(CheckpointError):
        new_learner(model=without.model_dir, shadow=EMA).load_trainer_state(without.path)


@pytest.mark.parametrize("rule", [EVERY, EMA], ids=["lag", "ema"])
def test_the_teacher_is_pushed_before_the_policy_and_only_after_changes(
    new_loop: NewLoop, rule: ShadowRule
) -> None:
    world = World([group(i) for i in range(8)])
    handed: list[tuple[int, dict[str, bytes]]] = []

    def teach(sent: Weights, version: int, _trained: TrainedGroups) -> dict[str, float]:
        world.events.append(f"teach {version}")
        handed.append((version, weights(loop.learner)))
        return {"push/seconds": 0.5, "push/pause": 0.1}

    objective = ObjectiveConfig(kl_coef=1.0)
    loop = new_loop(world, objective, learner={"shadow": rule}, teach=teach)
    loop.publish()
    versions = [weights(loop.learner)]
    reported = []
    for _ in range(4):
        reported.append("push/teacher_seconds" in loop.step())
        versions.append(weights(loop.learner))
    moved = [version for version in range(1, 5) if rule.ema or version == 3]
    assert reported == [version in moved for version in range(1, 5)]
    expected = ["teach 0", "publish 0"]
    for version in range(1, 5):
        expected.append(f"take [{2 * version - 2}, {2 * version - 1}]")
        expected += [f"teach {version}"] if version in moved else []
        expected.append(f"publish {version}")
    assert world.events == expected
    assert world.published == list(enumerate(versions)), "the teacher was pushed to the policy"
    for version, values in handed:
        assert (values == versions[version]) == (rule.every > 0 or version == 0)
    loop.publish()  # to engines that may hold anything
    assert world.events[-2:] == [f"teach {rule.version(4)}", "publish 4"]
