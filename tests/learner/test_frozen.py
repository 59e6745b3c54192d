"""Two workers share each frozen model and return the results of one."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.objective.settings import ObjectiveConfig
from learner.canaries import CopyQuestion
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss, cross_entropy_loss
from learner.process_group import WorkerGroup
from learner.sharding import local
from learner.teachers import FrozenModel, LocalTeachers
from tests.conftest import TinyPair
from tests.families import family_dir
from tests.learner.conftest import untimed
from tests.learner.two_workers import on_workers
from tests.samples import training_row
from tests.weights import numbers

# Of other architectures, hidden sizes and vocabularies than the student's: tied and untied heads,
# soft caps, experts, biases of routers that stay in float32.
TEACHERS = ("far", "gemma2", "llama_tied", "qwen3_moe", "deepseek_v3")
T = 0.7


def losses(
    models: dict[str, str], dtype: torch.dtype, group: WorkerGroup
) -> list[PolicyObjectiveLoss]:
    teachers = LocalTeachers(models, dtype=dtype, device="cpu", group=group)
    objective = ObjectiveConfig(estimator="full")
    return [PolicyObjectiveLoss(objective=objective, teachers=teachers)]


def story(learner: Learner, given: dict[str, Any]) -> dict[str, Any]:
    """Steps on rows of all teachers, and on one row; then all results of frozen models."""
    [loss] = learner.worker.losses
    assert isinstance(loss, PolicyObjectiveLoss) and loss.teachers is not None
    names, rows = list(given["models"]), []
    for i in range(2 * len(names) + 1):
        row = training_row(3 + i, 4 + 3 * (i % 4), seed=i, temperature=T, teacher_coef=1.0)
        if i % 3 == 0:
            context_T = np.arange(30, 37, dtype=np.int32)
            row = replace(row, teacher_context_T=context_T, teacher_replaces=2)
        rows.append(replace(row, teacher=names[i % len(names)]))
    dealt = learner.dealing.dealt(Part(rows_D=rows, loss=loss)).dealt or ()
    rounds = [{rows_B[0].teacher for rows_B, _ in each} for each in zip(*dealt, strict=True)]
    assert learner.workers == max(map(len, rounds)), "no two workers run different teachers"
    metrics = [learner.step(Part(rows_D=rows, loss=loss)) for _ in range(2)]
    metrics.append(learner.step(Part(rows_D=rows[:1], loss=loss)))
    metrics.append(learner.evaluate(Part(rows_D=rows, loss=loss)))
    held = {
        name: sum(local(p).nbytes for p in copy.model.parameters())
        for name, copy in loss.teachers.models.items()
        if isinstance(copy, FrozenModel)
    }
    reference = learner.reference_logprobs(given["reference"], rows)
    learner.drop_reference()
    return {
        "metrics": [untimed(each) for each in metrics],
        "held": held,
        "weights": numbers(learner.weights()),
        "teachers": {name: learner.teacher_logprobs(name, rows[:3]) for name in names},
        "reference": reference,
        "canaries": learner.canary(CopyQuestion(temperature=T)),
        "again": learner.canary(CopyQuestion(temperature=T)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_workers_score_as_one_and_each_holds_half(
    tiny_pair: TinyPair, tmp_path: Path, dtype: torch.dtype
) -> None:
    paths = {name: family_dir(tmp_path, name) for name in TEACHERS[1:]} | {"far": tiny_pair.teacher}
    models = {name: paths[name] for name in TEACHERS}
    config = LearnerConfig.of(
        model=tiny_pair.student, total_steps=9, token_budget=64, device="cpu", lr=1e-3
    )
    given = {"models": models, "reference": tiny_pair.teacher}
    make = partial(losses, models, dtype)
    own = make(WorkerGroup(None, "cpu"))
    alone = story(Learner(config, str(tmp_path), losses=own), given)
    together = on_workers(story, config, tmp_path, make, given)

    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (0.02, 0.05)
    for theirs, ours in zip(alone["metrics"], together["metrics"], strict=True):
        for name in ours.keys() - {"train/padding_share"}:
            assert ours[name] == pytest.approx(theirs[name], rel=rtol, abs=1e-5), name
    for name, weight in alone["weights"].items():
        np.testing.assert_allclose(together["weights"][name], weight, atol=3e-4, err_msg=name)
    for name in models:
        assert together["held"][name] == pytest.approx(alone["held"][name] / 2, rel=0.1), name
        pairs = zip(together["teachers"][name], alone["teachers"][name], strict=True)
        for ours_N, theirs_N in pairs:
            np.testing.assert_allclose(ours_N, theirs_N, rtol=rtol, atol=atol)
    for ours_N, theirs_N in zip(together["reference"], alone["reference"], strict=True):
        np.testing.assert_allclose(ours_N, theirs_N, rtol=1e-4, atol=1e-5)
    [expected] = alone["canaries"]
    for rank, answers in enumerate(together["canaries"]):
        assert [answer.teacher for answer in answers] == list(TEACHERS)
        for ours, theirs in zip(answers, expected, strict=True):
            np.testing.assert_allclose(
                ours.scored.answers[0].at_T_N, theirs.scored.answers[0].at_T_N, rtol=rtol, atol=atol
            )
        for before, after in zip(answers, together["again"][rank], strict=True):
            assert after.changed == () and after.digest == before.digest


def reference_story(learner: Learner, given: dict[str, Any]) -> Any:
    return learner.reference_logprobs(given["path"], given["rows"])


@pytest.mark.slow
def test_a_reference_of_fewer_rows_than_workers(tiny_pair: TinyPair, tmp_path: Path) -> None:
    config = LearnerConfig.of(
        model=tiny_pair.student, total_steps=1, token_budget=64, device="cpu", dtype="bfloat16"
    )
    given = {"path": tiny_pair.teacher, "rows": [training_row(4, 9, seed=1, temperature=T)]}
    alone = reference_story(Learner(config, str(tmp_path)), given)
    together = on_workers(
        reference_story, config, tmp_path, (cross_entropy_loss,), given, workers=3
    )
    np.testing.assert_allclose(together[0], alone[0], atol=0.1)
