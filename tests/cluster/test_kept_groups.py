"""Groups kept for inspection: their steps, their contents, and a rewind."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from cluster.store.kept_groups import KeptGroups, KeptGroupWriter
from distill.errors import DataError
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.types import TopLogprobs, TrajectoryGroup
from learner.checkpoint import CheckpointStore
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.loop import PolicyLoop
from learner.policy_loss import PolicyObjectiveLoss
from tests.conftest import TinyPair
from tests.distill.test_groups import assert_same
from tests.full_disk import files_of_at_most
from tests.learner.conftest import World
from tests.refusals import refuses
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
            trajectory(segment(3, 1, seed=3, version=4)),
        ),
        metrics={"time/rollout": 1.23456},
        teacher="big",
        answer="12",
    )


def kept(
    root: Path, groups: list[TrajectoryGroup], steps: range, every: int = 1, last: int | None = None
) -> KeptGroupWriter:
    writer = KeptGroupWriter(root, every, last=last)
    for step in steps:
        keep_step(writer, step, groups, policy_rows(groups, OBJECTIVE))
    return writer


def test_a_group_is_kept_whole_with_the_advantages_of_its_rows(tmp_path: Path) -> None:
    groups = [two_turns(), group(8)]
    rows = policy_rows(groups, OBJECTIVE)
    keep_step(KeptGroupWriter(tmp_path, 1, whole=True), 5, groups, rows)
    read = KeptGroups(tmp_path)
    assert read.places == [(5, 7), (5, 8)]
    assert [(each.step, each.version) for each in read] == [(5, 4), (5, 4)]
    assert_same(tuple(each.group for each in read), tuple(groups))
    advantages = [advantages_T for each in read for advantages_T in each.advantages_S]
    for advantages_T, row in zip(advantages, rows, strict=True):
        assert advantages_T.tolist() == row.advantages_T.tolist()
    spans = [each.action_spans for each in read[0].group.segments()]
    assert spans == [[(1, 3), (4, 5)], [(2, 4)], [(3, 4)]]


def test_the_tokens_with_most_of_a_step_s_kl_are_kept(tmp_path: Path) -> None:
    """The tokens of all groups of the step count, kept or not."""
    groups = [two_turns(), group(8)]
    kept(tmp_path, groups, range(5, 7))
    gaps: dict[int, list[float]] = {}
    for made in groups[0].segments(), groups[1].segments():
        for each in made:
            assert each.teacher_logprobs_T is not None
            for t in np.flatnonzero(each.action_mask_T):
                gap = each.behaviour_logprobs_T[t] - each.teacher_logprobs_T[t]
                gaps.setdefault(int(each.tokens_T[t]), []).append(float(gap))
    total = sum(abs(gap) for each in gaps.values() for gap in each)
    for step in (5, 6):
        tokens = KeptGroups(tmp_path).step_tokens(step)
        shares = [each.share for each in tokens]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1)
        assert {each.id for each in tokens} == gaps.keys()
        for each in tokens:
            expected = gaps[each.id]
            assert each.times == len(expected)
            assert each.mean == pytest.approx(np.mean(expected), abs=1e-6)
            assert each.share == pytest.approx(np.abs(expected).sum() / total, abs=1e-6)


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
    assert KeptGroups(tmp_path / "r").places == [(step, 3) for step in steps]


def test_routing_and_all_but_the_teacher_s_likeliest_tokens_are_left_out(tmp_path: Path) -> None:
    ids_NK = np.tile(np.arange(10, 18, dtype=np.int32), (3, 1))
    logprobs_NK = np.tile(np.log(np.array([1, 2, 3, 4, 5, 6, 7, 8]) / 40), (3, 1))
    top = TopLogprobs(ids_NK=ids_NK, logprobs_NK=logprobs_NK.astype(np.float32))
    made = segment(2, 3, seed=1, teacher_top=top, experts_TLK=np.ones((5, 2, 3), np.uint8))
    groups = [replace(group(3), trajectories_G=(trajectory(made),))]
    objective = ObjectiveConfig(estimator="top_k")
    keep_step(KeptGroupWriter(tmp_path, 1), 1, groups, policy_rows(groups, objective))
    [found] = KeptGroups(tmp_path)
    [read] = found.group.segments()
    assert read.experts_TLK is None and read.teacher_top is not None
    assert read.teacher_top.ids_NK.tolist() == [[17, 16, 15, 14, 13]] * 3
    expected = [np.log(np.arange(8, 3, -1) / 40)] * 3
    np.testing.assert_allclose(read.teacher_top.logprobs_NK, expected, atol=1e-6)


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    writer = kept(tmp_path, [group()], range(1, 8))
    (tmp_path / ".kept-000003.arrow.partial").write_text("a write that was cut")
    (tmp_path / "step-000009.arrow").write_text("of a replay")
    writer = pickle.loads(pickle.dumps(writer))
    writer.rewind(4)
    assert KeptGroups(tmp_path).steps == [1, 2, 3, 4]
    assert KeptGroups(tmp_path, after=2).steps == [3, 4]
    keep_step(writer, 5, [group(9)], policy_rows([group(9)], OBJECTIVE))
    assert [group_id for _, group_id in KeptGroups(tmp_path).places] == [0, 0, 0, 0, 9]
    writer.rewind(0)
    assert not KeptGroups(tmp_path) and (tmp_path / "step-000009.arrow").exists()
    KeptGroupWriter(tmp_path / "none", 1).rewind(3)
    assert not (tmp_path / "none").exists()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    kept(tmp_path, [group()], range(1, 3))
    second = tmp_path / "kept-000002.arrow"
    whole = second.read_bytes()
    second.write_bytes(whole[:-200])
    read = KeptGroups(tmp_path)
    assert read[0].step == 1
    with refuses(DataError, None, names="kept-000002.arrow"):
        read[1]
    second.write_bytes(whole[:50])
    with refuses(DataError, None, names="kept-000002.arrow"):
        KeptGroups(tmp_path)


def test_the_training_loop_keeps_the_groups_that_it_trained(
    tmp_path: Path, tiny_pair: TinyPair, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A filtered group has no rows, and the others have their own. A full disk ends nothing."""
    same = TrajectoryGroup(
        group_id=0, trajectories_G=(trajectory(segment()), trajectory(segment(seed=1)))
    )
    groups = [same, group(1), group(2), group(3, members=3)]
    objective = ObjectiveConfig(kl_coef=0, reward_coef=1.0, constant_groups="drop", num_substeps=2)
    later = [replace(each, group_id=each.group_id + 4) for each in groups]
    world = World([*groups, *later], per_step=4)
    loop = PolicyLoop(
        learner=Learner(
            LearnerConfig.of(model=tiny_pair.student, total_steps=2, device="cpu"),
            str(tmp_path / "f"),
        ),
        tokenizer=tokenizer,
        source=world,
        publish=world.publish,
        store=CheckpointStore(tmp_path / "checkpoints", keep=1),
        loss=PolicyObjectiveLoss(objective=objective),
        keep=KeptGroupWriter(tmp_path / "r", 1),
    )
    with files_of_at_most(0):
        loop.step()
    assert not KeptGroups(tmp_path / "r")
    loop.step()
    [found] = KeptGroups(tmp_path / "r")
    assert (found.step, found.version, found.group.group_id) == (2, 1, 5)
    [first, *_] = policy_rows(later[1:], objective)
    np.testing.assert_allclose(found.advantages_S[0], first.advantages_T, rtol=1e-6)
