"""Kept rollouts (rollouts.jsonl): their steps, their contents, and a rewind."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from cluster.run_files.rollouts import KeptGroups, RolloutLog
from distill.errors import DataError
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.types import StopReason, TopLogprobs, TrajectoryGroup
from learner.checkpoint import CheckpointStore
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.loop import PolicyLoop
from learner.policy_loss import PolicyObjectiveLoss
from tests.conftest import TinyPair
from tests.full_disk import files_of_at_most
from tests.learner.conftest import World
from tests.refusals import refuses
from tests.rows import write_rows
from tests.samples import group, keep_step, segment, trajectory

OBJECTIVE = ObjectiveConfig(kl_coef=0.0, reward_coef=1.0)


def two_turns() -> TrajectoryGroup:
    """A trajectory of two segments, the first with two turns and bonuses, and one of a segment."""
    mask = [False, True, True, False, True, False]
    first = segment(
        1, 5, seed=1, action_mask_T=mask, bonuses_T=[0, 0.25, 0, 0, 1e-7, 0],
        versions_T=[-1, 3, 3, -1, 4, -1],
    )  # fmt: skip
    return TrajectoryGroup(
        group_id=7,
        trajectories_G=(
            trajectory(first, segment(2, 2, seed=2, version=4), reward=1.0),
            trajectory(segment(3, 1, seed=3, version=4), stop=StopReason.LENGTH),
        ),
        metrics={"time/rollout": 1.23456},
        teacher="big",
        tag="sums",
        source="book",
        answer="12",
    )


def kept(
    path: Path, groups: list[TrajectoryGroup], steps: range, every: int = 1, last: int | None = None
) -> RolloutLog:
    log = RolloutLog(path, every, last=last)
    for step in steps:
        keep_step(log, step, groups, policy_rows(groups, OBJECTIVE))
    return log


def test_a_group_is_kept_with_its_training_rows(tmp_path: Path) -> None:
    path, groups = tmp_path / "rollouts.jsonl", [two_turns(), group(8)]
    rows = policy_rows(groups, OBJECTIVE)
    kept(path, groups, range(5, 6))
    [found] = KeptGroups(path)
    assert (found.step, found.version, found.group_id) == (5, 4, 7)
    assert (found.teacher, found.tag, found.temperature) == ("big", "sums", 0.7)
    assert (found.source, found.answer) == ("book", "12")
    assert found.metrics == {"time/rollout": 1.235}
    members = found.trajectories_G
    assert [(m.reward, m.stop_reason) for m in members] == [(1.0, "eos"), (0.0, "length")]
    segments = [each for member in members for each in member.segments]
    assert [each.actions for each in segments] == [[(1, 3), (4, 5)], [(2, 4)], [(3, 4)]]
    for each, made, row in zip(segments, groups[0].segments(), rows[:3], strict=True):
        mask_T = made.action_mask_T
        assert each.tokens_T == made.tokens_T.tolist()
        assert each.versions_N == made.versions_T[mask_T].tolist()
        assert each.advantages_N == pytest.approx(row.advantages_T[mask_T], rel=1e-3)
        assert each.behaviour_logprobs_N == pytest.approx(
            made.behaviour_logprobs_T[mask_T], abs=6e-5
        )
        assert made.teacher_logprobs_T is not None and each.teacher_logprobs_N is not None
        gap_N = np.subtract(each.behaviour_logprobs_N, each.teacher_logprobs_N)
        true_N = (made.behaviour_logprobs_T - made.teacher_logprobs_T)[mask_T]
        assert gap_N == pytest.approx(true_N, abs=1.2e-4)
    assert segments[0].bonuses_N == [0.25, 0, 1e-7]  # small numbers keep their digits
    assert segments[1].bonuses_N is None


def test_the_tokens_with_most_of_a_step_s_kl_are_kept_with_its_first_group(tmp_path: Path) -> None:
    """The tokens of all groups of the step count, kept or not."""
    path, groups = tmp_path / "rollouts.jsonl", [two_turns(), group(8)]
    kept(path, groups, range(5, 7))
    gaps: dict[int, list[float]] = {}
    for made in groups[0].segments(), groups[1].segments():
        for each in made:
            assert each.teacher_logprobs_T is not None
            for t in np.flatnonzero(each.action_mask_T):
                gap = each.behaviour_logprobs_T[t] - each.teacher_logprobs_T[t]
                gaps.setdefault(int(each.tokens_T[t]), []).append(float(gap))
    total = sum(abs(gap) for each in gaps.values() for gap in each)
    for found in KeptGroups(path):
        shares = [each.share for each in found.step_tokens]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1)
        assert {each.id for each in found.step_tokens} == gaps.keys()
        for each in found.step_tokens:
            expected = gaps[each.id]
            assert each.times == len(expected)
            assert each.mean == pytest.approx(np.mean(expected), abs=1e-6)
            assert each.share == pytest.approx(np.abs(expected).sum() / total, abs=1e-6)
    whole = RolloutLog(tmp_path / "whole", 1, whole=True)
    keep_step(whole, 1, groups, policy_rows(groups, OBJECTIVE))
    assert [bool(each.step_tokens) for each in KeptGroups(tmp_path / "whole")] == [True, False]


@pytest.mark.parametrize(
    ("every", "last", "steps"),
    [
        (0, 7, []), (1, None, [1, 2, 3, 4, 5, 6, 7]), (3, 7, [1, 4, 7]), (10, None, [1]),
        (10, 7, [1, 7]),
    ],
)  # fmt: skip
def test_the_first_step_each_nth_and_the_last_are_kept(
    tmp_path: Path, every: int, last: int | None, steps: list[int]
) -> None:
    kept(tmp_path / "r", [group(3), group(4)], range(1, 8), every, last)
    found = KeptGroups(tmp_path / "r")
    assert [each.step for each in found] == steps
    assert {each.group_id for each in found} <= {3}


def test_the_teacher_s_first_few_alternatives_are_kept(tmp_path: Path) -> None:
    made = segment(2, 3, seed=1)
    ids_NK = np.tile(np.arange(10, 18, dtype=np.int32), (3, 1))
    logprobs_NK = np.tile(np.log(np.array([1, 2, 3, 4, 5, 6, 7, 8]) / 40), (3, 1))
    top = TopLogprobs(ids_NK=ids_NK, logprobs_NK=logprobs_NK.astype(np.float32))
    groups = [replace(group(3), trajectories_G=(trajectory(replace(made, teacher_top=top)),))]
    objective = ObjectiveConfig(estimator="top_k")
    keep_step(RolloutLog(tmp_path / "r", 1), 1, groups, policy_rows(groups, objective))
    [found] = KeptGroups(tmp_path / "r")
    [kept_segment] = found.trajectories_G[0].segments
    assert kept_segment.teacher_top_NK is not None and len(kept_segment.teacher_top_NK) == 3
    for top_K in kept_segment.teacher_top_NK:
        assert [id_ for id_, _ in top_K] == [17, 16, 15, 14, 13]
        assert [q for _, q in top_K] == pytest.approx(np.log(np.arange(8, 3, -1) / 40), abs=1e-4)
    row = json.loads((tmp_path / "r").read_text())
    row["trajectories"][0]["segments"][0]["teacher_top"].pop()
    write_rows(tmp_path / "r", row)
    with refuses(DataError, None, names="r:1"):
        KeptGroups(tmp_path / "r")


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    log = kept(path, [group(teacher_logprobs_T=None)], range(1, 8))
    with path.open("a") as file:
        file.write('{"step": 3, "gro')  # cut in the middle of a line
    [unscored, *_] = read = KeptGroups(path)
    assert len(read) == 7
    assert all(s.teacher_logprobs_N is None for m in unscored.trajectories_G for s in m.segments)
    log = pickle.loads(pickle.dumps(log))
    log.rewind(4)
    assert [each.step for each in KeptGroups(path)] == [1, 2, 3, 4]
    keep_step(log, 5, [group(9)], policy_rows([group(9)], OBJECTIVE))
    assert [each.group_id for each in KeptGroups(path)] == [0, 0, 0, 0, 9]
    log.rewind(0)
    assert path.read_bytes() == b""
    RolloutLog(tmp_path / "none", 1).rewind(3)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("actions", [[2, 1]]),
        ("actions", [[0, 999]]),
        ("advantages", [1.0]),
        ("tokens", None),
        ("tokens", [-1, 1, 2, 3, 4]),
    ],
)
def test_a_line_that_is_no_group_is_named(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "r"
    kept(path, [group()], range(1, 3))
    first, second = map(json.loads, path.read_text().splitlines())
    second["trajectories"][0]["segments"][0][field] = value
    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    with refuses(DataError, None, names="r:2"):
        KeptGroups(path)
    path.write_text('{"step": 1}\n')
    with refuses(DataError, None, names="r:1"):
        KeptGroups(path)


def test_the_training_loop_keeps_the_groups_that_it_trained(
    tmp_path: Path, tiny_pair: TinyPair, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A filtered group has no rows, and the others have their own."""
    same = TrajectoryGroup(
        group_id=0, trajectories_G=(trajectory(segment()), trajectory(segment(seed=1)))
    )
    groups = [same, group(1), group(2), group(3, members=3)]
    objective = ObjectiveConfig(kl_coef=0, reward_coef=1.0, constant_groups="drop", num_substeps=2)
    world = World(groups, per_step=4)
    loop = PolicyLoop(
        learner=Learner(
            LearnerConfig.of(model=tiny_pair.student, total_steps=1, device="cpu"),
            str(tmp_path / "f"),
        ),
        tokenizer=tokenizer,
        source=world,
        publish=world.publish,
        store=CheckpointStore(tmp_path / "checkpoints", keep=1),
        loss=PolicyObjectiveLoss(objective=objective),
        keep=RolloutLog(tmp_path / "r", 1),
    )
    with files_of_at_most(0):
        loop.step()
    assert not len(KeptGroups(tmp_path / "r"))
    loop.save()
    [found] = KeptGroups(tmp_path / "r")
    assert (found.step, found.version, found.group_id) == (1, 0, 1)
    [first, *_] = policy_rows(groups[1:], objective)
    assert found.trajectories_G[0].segments[0].advantages_N == pytest.approx(
        first.advantages_T[first.loss_mask_T], rel=1e-3
    )
