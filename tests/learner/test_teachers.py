"""Teachers in the learner's process: their whole distribution at T, after their own context."""

import asyncio
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.embedded.engine import EmbeddedEngine
from actors.rollout.teacher import score_group
from distill.chat.segments import SegmentBuilder
from distill.errors import CheckpointError
from distill.objective.batching import TrainingRow
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.types import TokenArray, TrajectoryGroup
from learner.teachers import LocalTeachers, teacher_row
from tests.conftest import TinyPair
from tests.learner.conftest import NewLoop, World, naive_distribution
from tests.samples import group, ids, sample, training_row, trajectory

FULL = ObjectiveConfig(estimator="full")
GROUPS = [group(0, members=3), group(1, members=2)]


@pytest.fixture(scope="module")
def teachers(tiny_pair: TinyPair) -> LocalTeachers:
    """The unnamed teacher, the same with a name, and the student itself."""
    models = {"": tiny_pair.teacher, "far": tiny_pair.teacher, "self": tiny_pair.student}
    return LocalTeachers(models, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def teacher_model(tiny_pair: TinyPair) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_pair.teacher, dtype=torch.float32).eval()


def seen_by_teacher(row: TrainingRow, context_T: TokenArray) -> TrainingRow:
    """The response after another context, as a separate row."""
    response = len(row) - row.first_trained
    shape = len(context_T) + response
    return TrainingRow(
        tokens_T=np.concatenate([context_T, row.tokens_T[row.first_trained :]]),
        loss_mask_T=np.arange(shape) >= len(context_T), advantages_T=np.zeros(shape, np.float32),
        behaviour_logprobs_T=np.zeros(shape, np.float32), temperature=row.temperature,
        source=row.source,
    )  # fmt: skip


def naive_reverse_kl(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    groups: list[TrajectoryGroup],
    context_T: TokenArray | None = None,
) -> Tensor:
    """KL(p_T || q_T) at every trained token, row by row, as a written-out sum."""
    found = []
    with torch.no_grad():
        for row in policy_rows(groups, FULL):
            seen = row if context_T is None else seen_by_teacher(row, context_T)
            p = naive_distribution(student, row).double()
            q = naive_distribution(teacher, seen).double()
            for p_V, q_V in zip(p, q, strict=True):
                found.append(sum(a.exp() * (a - b) for a, b in zip(p_V, q_V, strict=True)))
    return torch.stack(found)


@pytest.mark.parametrize("budget", [1, 4096])
def test_the_first_divergence_is_the_exact_one(
    new_loop: NewLoop,
    teachers: LocalTeachers,
    plain_model: PreTrainedModel,
    teacher_model: PreTrainedModel,
    budget: int,
) -> None:
    loop = new_loop(World(GROUPS), FULL, teachers=teachers, learner={"token_budget": budget})
    metrics = loop.step()
    expected = naive_reverse_kl(plain_model, teacher_model, GROUPS).mean().item()
    assert metrics["opd/divergence"] == pytest.approx(expected, rel=1e-4)
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("length", [1, 6, 60])  # the longest is run once for all who share it
def test_the_teacher_sees_the_privileged_context(
    new_loop: NewLoop,
    teachers: LocalTeachers,
    plain_model: PreTrainedModel,
    teacher_model: PreTrainedModel,
    length: int,
) -> None:
    context_T = ids(*range(40, 40 + length))
    with_context = [group(i, members=2, teacher_context_T=context_T) for i in range(2)]
    untold = [group(i, members=2) for i in range(2)]
    made = {}
    for name, groups in (("with_context", with_context), ("untold", untold)):
        made[name] = new_loop(World(groups), FULL, teachers=teachers).step()["opd/divergence"]
    expected = naive_reverse_kl(plain_model, teacher_model, with_context, context_T).mean().item()
    assert made["with_context"] == pytest.approx(expected, rel=1e-4)
    assert abs(made["with_context"] - made["untold"]) > 0.1


def test_served_and_local_teachers_see_the_same(
    teachers: LocalTeachers, tiny_pair: TinyPair
) -> None:
    """An untrained turn and a tool's answer, then a segment that begins with the prompt again."""
    builder = SegmentBuilder(0.7, ids(90, 91, 92, 93, 94))
    builder.append(ids(1, 2, 3), sample(10, 11), trained=False)
    builder.append(ids(1, 2, 3, 10, 11, 4, 5), sample(20, 21))
    builder.append(ids(1, 2, 3, 11, 6), sample(30))
    builder.append(ids(7, 8), sample(31))
    made = TrajectoryGroup(group_id=0, trajectories_G=(trajectory(*builder.build()),))

    async def served() -> TrajectoryGroup:
        engine = EmbeddedEngine(model_path=tiny_pair.teacher, device="cpu", threads=1)
        try:
            return await score_group(engine, made)
        finally:
            await engine.close()

    by_engine = asyncio.run(asyncio.wait_for(served(), 60)).segments()
    seen = [teacher_row(row) for row in policy_rows([made], FULL)]
    assert [row.tokens_T.tolist() for row in seen] == [
        [90, 91, 92, 93, 94, 10, 11, 4, 5, 20, 21], [90, 91, 92, 93, 94, 11, 6, 30], [7, 8, 31],
    ]  # fmt: skip
    by_copy = teachers.models[""].logprobs(seen, 4096)
    for segment, local_N in zip(by_engine, by_copy, strict=True):
        assert segment.teacher_logprobs_T is not None
        of_engine_N = segment.teacher_logprobs_T[segment.action_mask_T]
        np.testing.assert_allclose(of_engine_N, local_N, atol=1e-5)


# Several teachers


def taught(made: TrajectoryGroup, teacher: str) -> TrajectoryGroup:
    return replace(made, teacher=teacher)


@pytest.mark.parametrize("weights", [None, {"far": 3.0, "self": 5.0}])
def test_each_teacher_counts_by_its_weight(
    new_loop: NewLoop,
    teachers: LocalTeachers,
    plain_model: PreTrainedModel,
    teacher_model: PreTrainedModel,
    weights: dict[str, float] | None,
) -> None:
    """The student's own copy is at distance 0 with any weight."""
    groups = [taught(GROUPS[0], "self"), taught(GROUPS[1], "far")]
    objective = ObjectiveConfig(estimator="full", kl_coef=0.5)
    loop = new_loop(World(groups), objective, teachers=teachers, teacher_weights=weights)
    metrics = loop.step()
    far = naive_reverse_kl(plain_model, teacher_model, GROUPS[1:]).sum().item()
    far /= metrics["train/tokens"]
    weight = weights["far"] if weights else 1.0
    assert metrics["opd/divergence"] == pytest.approx(far, rel=1e-4)  # as it is, not as it counts
    assert metrics["train/loss"] == pytest.approx(0.5 * weight * far, rel=1e-4)


def test_a_teacher_that_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(CheckpointError):
        LocalTeachers({"": "/no-such-teacher"}, dtype=torch.float32, device="cpu")


def test_a_teacher_in_bfloat16_computes_in_its_own_precision(tiny_pair: TinyPair) -> None:
    """Not in the learner's: its log-probs are those of transformers."""
    half = LocalTeachers({"": tiny_pair.teacher}, dtype=torch.bfloat16, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.teacher, dtype=torch.bfloat16).eval()
    row = training_row(6, 5, seed=3)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # torch only warns of an autocast that it cannot do
        [found_N] = half.models[""].logprobs([row], 4096)
        logits_TV = model(input_ids=torch.tensor([row.tokens_T.tolist()])).logits[0].float()
    log_q_TV = torch.log_softmax(logits_TV / row.temperature, dim=1)
    expected_N = log_q_TV[5:-1][torch.arange(5), torch.tensor(row.tokens_T[6:].tolist())]
    np.testing.assert_allclose(found_N, expected_N, atol=0.15)
    assert found_N.dtype == np.float32


def test_a_teacher_without_a_weight_is_no_teacher_of_weight_one() -> None:
    with pytest.raises(KeyError):
        policy_rows([replace(group(), teacher="forgotten")], ObjectiveConfig(), {"other": 1.0})
