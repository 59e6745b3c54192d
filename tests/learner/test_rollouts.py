"""Rollouts on several workers: each fetches and builds its rows, and the result is that of one."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import chz
import numpy as np
import pytest
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.objective.batching import TrainingRow
from distill.objective.metrics import TokenTable, tokens_by_gap
from distill.objective.objectives import reference_gap_sum
from distill.objective.rows import (
    advantage_metrics,
    advantage_stats,
    policy_rows,
    segment_to_score,
)
from distill.objective.settings import Normalisation, ObjectiveConfig
from distill.objective.sums import meta_of
from distill.objective.whole_groups import LocalGroups
from distill.records import Fetched, StepGroups, TrainedGroups, TrajectoryGroupMeta, TrajectoryId
from distill.tokenizer import load_tokenizer
from distill.types import TrajectoryGroup
from distill.weights.model_weights import Weights
from learner import rollout_share
from learner.checkpoint import CheckpointStore
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.loop import PolicyLoop
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss, TeacherSamplesLoss
from learner.sharding import Fingerprints
from tests.conftest import TinyPair
from tests.learner.conftest import NewLoop, World, naive_logprobs, untimed, weights
from tests.learner.two_workers import on_workers
from tests.samples import group, segment, trajectory
from tests.sequences import with_other_rows
from tests.waiting import DEADLINE_S
from tests.weights import numbers

# All terms in which a row depends on others: of its group, of its sequence, of the step.
WHOLE = ObjectiveConfig(
    loss="gspo", kl_coef=0.5, reward_coef=1.0, reference_kl_coef=0.3, kl_discount_factor=0.9,
    correction="truncate", num_substeps=2, normalisation="sequence",
)  # fmt: skip
WITHOUT_TEACHER = chz.replace(WHOLE, kl_coef=0.0, constant_groups="drop")
SLOW = pytest.mark.slow
TEACHER_WEIGHTS = {"a": 1.0, "b": 0.25}


def scored(prompt: int, actions: int, seed: int, *, reference: bool):
    made = segment(prompt, actions, seed=seed)
    if not reference:
        return made
    return replace(
        made, reference_logprobs_T=segment(prompt, actions, seed=900 + seed).behaviour_logprobs_T
    )


def groups_of_segments(reference: bool = True) -> list[TrajectoryGroup]:
    """Two steps of four groups of three trajectories, most with one of several segments.

    One group has equal rewards.
    """
    groups = []
    for i in range(8):
        members = [
            trajectory(
                *(
                    scored(2 + n, 3 + 2 * n + g, 50 * i + 7 * g + n, reference=reference)
                    for n in range(1 + i % 3 if g == 0 else 1)
                ),
                reward=1.0 if i == 1 else float(g % 2),
            )
            for g in range(3)
        ]
        groups.append(
            TrajectoryGroup(group_id=i, trajectories_G=tuple(members), teacher="ab"[i % 2])
        )
    return groups


class Noting(World):
    """Record the trajectories that the leader fetches; a step waits for some of the next one's."""

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        super().__init__(groups, per_step=4)
        self.fetched: list[set[TrajectoryId]] = []
        self._ahead = threading.Event()

    def peek(
        self, trained: TrainedGroups, known: Collection[int], whole: bool
    ) -> list[TrajectoryGroupMeta] | None:
        return None if known else [meta_of(made) for made in self.groups[: self.per_step]] or None

    def trajectories(self, places: Sequence[TrajectoryId], ahead: bool = False) -> Fetched:
        if not ahead:
            self.fetched.append(set(places))
            return super().trajectories(places)
        there = {made.group_id: made for made in self.groups}
        self._ahead.set()
        return Fetched({at: there[at.group_id].trajectories_G[at.member] for at in places}, {})

    def publish(self, weights: Weights, version: int, trained: TrainedGroups) -> dict[str, float]:
        assert self._ahead.wait(DEADLINE_S) or not self.groups, "nothing is fetched ahead"
        return super().publish(weights, version, trained)


class KeepAll:
    """Log that keeps everything."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def chosen(self, step: int, group_ids: Sequence[int]) -> Sequence[int]:
        return group_ids[1:]

    def keep(
        self,
        step: int,
        groups_P: Sequence[TrajectoryGroup],
        rows_D: Sequence[TrainingRow],
        tables: Sequence[TokenTable | None],
    ) -> None:
        self.kept.append((step, groups_P, rows_D, tables))

    def flush(self) -> None:
        """Nothing waits."""


def steps(learner: Learner, given: dict[str, Any]) -> dict[str, Any]:
    """Two steps of a loop, seen from its leader."""
    world, keep = Noting(given["groups"]), KeepAll()
    loop = PolicyLoop(
        learner=learner, tokenizer=load_tokenizer(given["tokenizer"]), source=world,
        publish=world.publish, peek=world.peek,
        store=CheckpointStore(Path(given["root"]), keep=1), loss=given["loss"],
        teacher_weights=TEACHER_WEIGHTS, base_is_reference=given["base_is_reference"], keep=keep,
    )  # fmt: skip
    prints = [learner.fingerprints()]
    metrics = []
    for _ in range(2):
        metrics.append(loop.step())
        prints.append(learner.fingerprints())
    return {
        "metrics": metrics, "prints": prints, "weights": numbers(learner.weights()),
        "fetched": world.fetched, "kept": keep.kept,
    }  # fmt: skip


def learner_config(model: str, **changes: Any) -> LearnerConfig:
    settings = {"lr": 3e-3, "total_steps": 4, "token_budget": 24, "max_grad_norm": 0.5}
    return LearnerConfig.of(model=model, device="cpu", **settings | changes)


def assert_one_learner(alone: dict[str, Any], together: dict[str, Any]) -> None:
    for theirs, ours in zip(alone["metrics"], together["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        # Cut into other batches; others may have fetched less.
        for name in untimed(ours).keys() - {"train/padding_share", "rollout/ahead_share"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    for name, theirs in alone["weights"].items():
        # As a whole: AdamW amplifies the last bits of tiny gradients.
        gap = np.linalg.norm(together["weights"][name] - theirs)
        assert gap <= 1e-4 * np.linalg.norm(theirs), name
    assert_prints_alike(alone["prints"], together["prints"])
    for theirs, ours in zip(alone["kept"], together["kept"], strict=True):
        assert_kept_alike(theirs, ours)


def assert_prints_alike(alone: list[Fingerprints], together: list[Fingerprints]) -> None:
    """Assert that fingerprints of equal weights are equal, however they are sharded."""
    for name, (bits, norm) in alone[0]["weights"].items():
        assert together[0]["weights"][name] == (bits, pytest.approx(norm, rel=1e-9)), name
    assert not alone[0]["gradient"] and not together[0]["gradient"]
    wholes = []
    for theirs, ours in zip(alone[1:], together[1:], strict=True):
        for what in ("gradient", "weights"):
            whole = np.hypot.reduce([norm for _, norm in theirs[what].values()])
            assert theirs[what].keys() == ours[what].keys()
            for name, (_, norm) in theirs[what].items():
                assert ours[what][name][1] == pytest.approx(norm, rel=1e-2, abs=1e-5 * whole), name
            wholes.append(whole)
    assert max(wholes[::2]) > 0 < min(wholes[1::2])  # a step whose groups are left out has none


def assert_kept_alike(theirs: Any, ours: Any) -> None:
    step, groups, rows, tables = theirs
    other_step, other_groups, other_rows, other_tables = ours
    assert step == other_step and len(rows) == len(other_rows) > len(groups) > 0
    assert [made.group_id for made in groups] == [made.group_id for made in other_groups]
    for row, other in zip(rows, other_rows, strict=True):
        assert row.tokens_T.tolist() == other.tokens_T.tolist()
        np.testing.assert_allclose(row.advantages_T, other.advantages_T, rtol=1e-5, atol=1e-6)
        if row.proximal_logprobs_T is None:  # the teacher's sample: there is no ratio
            assert other.proximal_logprobs_T is None
            continue
        np.testing.assert_allclose(row.proximal_logprobs_T, other.proximal_logprobs_T, atol=1e-5)
    listed, other_listed = tokens_by_gap(tables, 10**6), tokens_by_gap(other_tables, 10**6)
    assert sum(one.times for one in listed) == sum(one.times for one in other_listed) > 0
    for one, other in zip(listed, other_listed, strict=True):
        assert one.share == pytest.approx(other.share, abs=1e-6)


@pytest.mark.parametrize(
    ("objective", "base_is_reference", "workers"),
    [
        (WHOLE, True, 2),
        pytest.param(WHOLE, True, 4, marks=SLOW),
        pytest.param(WITHOUT_TEACHER, False, 2, marks=SLOW),
    ],
    ids=["2 workers", "4 workers", "2 workers, groups left out"],
)
def test_workers_that_make_their_own_rows_are_one_learner(
    tiny_pair: TinyPair,
    tmp_path: Path,
    objective: ObjectiveConfig,
    base_is_reference: bool,
    workers: int,
) -> None:
    groups = groups_of_segments(reference=not base_is_reference)
    groups = [replace(made, by_teacher=made.group_id in (2, 6)) for made in groups]
    given = {
        "groups": groups, "tokenizer": tiny_pair.student, "root": str(tmp_path / "checkpoints"),
        "loss": (loss := PolicyObjectiveLoss(objective=objective)),
        "base_is_reference": base_is_reference,
    }  # fmt: skip
    config = learner_config(tiny_pair.student, **{"lora_rank": 2} if base_is_reference else {})
    alone = steps(Learner(config, str(tmp_path / "failed")), given)
    losses = loss, TeacherSamplesLoss(normalisation=objective.normalisation)
    everywhere = LocalGroups()
    everywhere.taken(groups, set_aside={})
    together = on_workers(
        steps, config, tmp_path, losses, given, source=everywhere, workers=workers
    )
    assert_one_learner(alone, together)
    filtered = {1} if objective.constant_groups == "drop" else set()
    everything = {TrajectoryId(i, g) for i in set(range(8)) - filtered for g in range(3)}
    assert set().union(*alone["fetched"]) == everything, "a group that is filtered out was fetched"
    for fetched, of_all in zip(together["fetched"], alone["fetched"], strict=True):
        assert fetched < of_all, "the leader fetched what others train"
    assert "reference/kl" in together["metrics"][0]
    for run in (alone, together):
        assert [m["rollout/ahead_share"] > 0 for m in run["metrics"]] == [False, True]


def one_step(learner: Learner, given: dict[str, Any]) -> dict[str, float]:
    world = World(given["groups"], per_step=len(given["groups"]))
    return PolicyLoop(
        learner=learner, tokenizer=load_tokenizer(given["model"]), source=world,
        publish=world.publish, store=CheckpointStore(given["root"], keep=1), loss=given["loss"],
        base_is_reference=True,
    ).step()  # fmt: skip


def test_a_worker_without_samples_of_the_policy_scores_the_reference_with_the_others(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """One sample on two workers: the other repeats it, and trains only a teacher's sample."""
    loss = PolicyObjectiveLoss(objective=ObjectiveConfig(reference_kl_coef=0.3))
    sampled, taught = (
        TrajectoryGroup(group_id=i, trajectories_G=(trajectory(segment(3, 5, seed=i)),))
        for i in range(2)
    )
    groups = [sampled, replace(taught, by_teacher=True)]
    given = {"groups": groups, "model": tiny_pair.student, "root": tmp_path / "out", "loss": loss}
    config = learner_config(tiny_pair.student, lora_rank=2)
    alone = one_step(Learner(config, str(tmp_path / "failed")), given)
    losses = loss, TeacherSamplesLoss(normalisation="token")
    everywhere = LocalGroups()
    everywhere.taken(groups, set_aside={})
    together = on_workers(one_step, config, tmp_path, losses, given, source=everywhere)
    assert untimed(together) == pytest.approx(untimed(alone), rel=1e-5, abs=1e-6)
    assert alone["train/groups"] == 2 and "reference/kl" in alone


OBJECTIVES = {
    "sampled": ObjectiveConfig(kl_coef=0.7, kl_discount_factor=0.9, reward_coef=1.0),
    "ppo": ObjectiveConfig(loss="ppo", kl_coef=0, reward_coef=1.0, scale_by_std=True),
    "reference": ObjectiveConfig(reference_kl_coef=0.3, reward_coef=1.0),
    "whole": chz.replace(WHOLE, num_substeps=1),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_one_worker_trains_on_the_rows_of_whole_groups(
    new_loop: NewLoop, objective: ObjectiveConfig
) -> None:
    """Bit for bit equal to rows made of whole groups."""
    groups = groups_of_segments()[:2]
    loop = new_loop(World(groups), objective, teacher_weights=TEACHER_WEIGHTS)
    metrics = loop.step()
    other = new_loop(World([]), objective)
    rows = policy_rows(groups, objective, TEACHER_WEIGHTS)
    expected = advantage_metrics([advantage_stats(rows)], objective)
    rows = with_other_rows(rows, objective, other.learner.logprobs)
    expected |= untimed(other.learner.step(Part(rows_D=rows, loss=other.loss)))
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert weights(loop.learner) == weights(other.learner)
    if objective.reference_kl_coef:
        segments = [s for made in groups for s in made.segments()]
        tokens = sum(s.num_actions for s in segments)
        assert metrics["reference/kl"] == reference_gap_sum(segments) / tokens


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_teacher_samples_weigh_by_groups_and_change_no_policy_metric(
    new_loop: NewLoop, plain_model: PreTrainedModel, normalisation: Normalisation
) -> None:
    """By hand: (1/4) of the cross-entropy of one group, and (3/4) of the policy loss of three."""
    objective = ObjectiveConfig(
        kl_coef=0.7, reward_coef=1.0, baseline="global", normalisation=normalisation
    )
    groups = groups_of_segments()[:4]
    theirs = replace(groups[2], by_teacher=True)
    own = [made for made in groups if made.group_id != 2]
    loop = new_loop(World([*own, theirs], per_step=4), objective, teacher_weights=TEACHER_WEIGHTS)
    alone = new_loop(World(own, per_step=3), objective, teacher_weights=TEACHER_WEIGHTS)
    made, expected = untimed(loop.step()), untimed(alone.step())

    nlls, tokens, gap = [], 0, 0.0
    for member in theirs.trajectories_G:
        nll_N = []
        for s in member.segments:
            row = segment_to_score(s)
            nll_N += (-naive_logprobs(plain_model, row).detach()).tolist()
            gap += s.behaviour_logprobs_T.sum()
        nlls.append(nll_N)
        tokens += len(nll_N)
    nll = sum(map(sum, nlls)) / tokens
    mean = nll if normalisation == "token" else np.mean([np.mean(nll_N) for nll_N in nlls])
    coef = 0.7 * TEACHER_WEIGHTS["a"]  # of the group's own teacher
    assert made["train/loss"] == pytest.approx(
        0.25 * coef * mean + 0.75 * expected["train/loss"], rel=1e-4
    )
    assert made["teacher_samples/nll"] == pytest.approx(nll, rel=1e-4)
    assert made["teacher_samples/forward_kl"] == pytest.approx(nll + gap / tokens, rel=1e-4)
    assert made["teacher_samples/share"] == 0.25
    assert made["train/tokens"] == expected["train/tokens"] + tokens
    changed = {"train/loss", "train/tokens", "train/groups", "train/grad_norm", "groups/last"}
    changed |= {"groups/watermark", "train/padding_share", "push/bytes"}
    for name in expected.keys() - changed:
        assert made[name] == pytest.approx(expected[name], rel=1e-5), name


def test_a_step_of_teacher_samples_alone_has_no_policy_metrics(
    new_loop: NewLoop, plain_model: PreTrainedModel
) -> None:
    objective = ObjectiveConfig(reference_kl_coef=0.5, num_substeps=2, correction="truncate")
    groups = [replace(group(i), by_teacher=True) for i in range(2)]
    keep = KeepAll()
    metrics = new_loop(World(groups), objective, keep=keep).step()
    assert metrics["train/updates"] == 2 and metrics["teacher_samples/share"] == 1
    prefixes = ("opd/", "staleness/", "reward/", "rollout/", "advantage/", "train/ratio")
    assert [name for name in metrics if name.startswith(prefixes)] == ["rollout/ahead_share"]
    [(_, [kept], rows, tables)] = keep.kept
    assert kept.by_teacher and len(rows) == 2 and tokens_by_gap(tables, 9) == []


class Losing(World):
    """Lose a group when it is first fetched, and return another later."""

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        super().__init__(groups)
        self.lost: list[Mapping[int, str]] = []

    def trajectories(self, places: Sequence[TrajectoryId], ahead: bool = False) -> Fetched:
        found, _ = super().trajectories(places, ahead)
        if self.lost:
            return Fetched(found, {})
        return Fetched({at: t for at, t in found.items() if at.group_id}, {0: "its node is gone"})

    def mark_lost(self, lost: Mapping[int, str]) -> None:
        self.lost.append(lost)


def test_groups_lost_before_the_step_are_taken_again(
    new_loop: NewLoop, tokenizer: PreTrainedTokenizerBase
) -> None:
    again = [group(0, members=3), group(1)]
    world = Losing([group(0), group(1), *again])
    loop = new_loop(world, OBJECTIVES["sampled"])
    metrics = loop.step()
    assert world.lost == [{0: "its node is gone"}]
    assert world.events == ["take [0, 1]", "take [0, 1]", "publish 1"]
    assert metrics["train/tokens"] == sum(made.num_actions for made in again)
    assert loop.save().delivery == {"watermark": 2, "set_aside": {}}


class Ahead(World):
    """Offer the next step's groups while one is trained, which ends only after they were fetched.

    Groups of `lost` are missing then; `remade` ones replace others before the step.
    """

    def __init__(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        lost: Collection[int] = (),
        remade: Sequence[TrajectoryGroup] = (),
    ) -> None:
        super().__init__(groups)
        self.lost, self.remade = set(lost), {made.group_id: made for made in remade}
        self.ahead: list[int] = []  # groups that were asked for ahead
        self._told = threading.Event()

    def peek(
        self, trained: TrainedGroups, known: Collection[int], whole: bool
    ) -> list[TrajectoryGroupMeta] | None:
        if set(known) >= {made.group_id for made in self.groups[:2]}:
            self._told.set()  # asked again: those are fetched
            return None
        groups = [made for made in self.groups[:2] if made.group_id not in known]
        return [meta_of(made) for made in (groups if whole else groups[:1])]

    def trajectories(self, places: Sequence[TrajectoryId], ahead: bool = False) -> Fetched:
        if not ahead:
            return super().trajectories(places)
        self.ahead += sorted({at.group_id for at in places})
        there = {made.group_id: made for made in self.groups}
        gone = dict.fromkeys(self.lost & {at.group_id for at in places}, "its node is gone")
        here = [at for at in places if at.group_id not in gone]
        return Fetched({at: there[at.group_id].trajectories_G[at.member] for at in here}, gone)

    def take(self, trained: TrainedGroups) -> StepGroups:
        self.groups[:2] = [self.remade.get(made.group_id, made) for made in self.groups[:2]]
        return super().take(trained)

    def publish(self, weights: Weights, version: int, trained: TrainedGroups) -> dict[str, float]:
        assert self._told.wait(DEADLINE_S) or not self.groups, (
            "the next step's groups are not fetched"
        )
        self._told.clear()
        return super().publish(weights, version, trained)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_rows_of_the_next_step_are_built_during_a_step(
    new_loop: NewLoop, objective: ObjectiveConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, str]] = []
    make = rollout_share.trajectory_rows

    def noted(*arguments: Any, group_id: int, **others: Any) -> Any:
        made.append((group_id, threading.current_thread().name))
        return make(*arguments, group_id=group_id, **others)

    monkeypatch.setattr(rollout_share, "trajectory_rows", noted)
    groups = groups_of_segments()[:4]
    world, other = Ahead(groups), World(groups)
    ahead = new_loop(world, objective, teacher_weights=TEACHER_WEIGHTS, peek=world.peek)
    first = ahead.step()
    by_ahead = {group_id for group_id, thread in made if thread == "ahead"}
    assert by_ahead == (set() if objective.reference_kl_coef else {2, 3})
    before = len(made)
    second = ahead.step()
    assert len(made) == before + (6 if objective.reference_kl_coef else 0), "rows were made twice"
    assert (first["rollout/ahead_share"], second["rollout/ahead_share"]) == (0, 1)
    assert world.ahead == [2, 3] and 0 < second["time/rows"] < second["time/step"]
    alone = new_loop(other, objective, teacher_weights=TEACHER_WEIGHTS)
    for metrics in (first, second):
        expected = untimed(alone.step()) | {"rollout/ahead_share": metrics["rollout/ahead_share"]}
        assert untimed(metrics) == expected
    assert weights(ahead.learner) == weights(alone.learner)


@pytest.mark.parametrize("lost", [True, False])
def test_a_remade_group_replaces_the_prefetched_one(new_loop: NewLoop, lost: bool) -> None:
    """Group 2 is lost when prefetched, or prefetched and then rescored before it is taken."""
    groups = groups_of_segments()[:4]
    remade = replace(groups_of_segments()[6], group_id=2)
    world = Ahead(groups, lost={2} if lost else (), remade=[remade])
    loop = new_loop(world, OBJECTIVES["sampled"], peek=world.peek)
    loop.step()
    assert loop.step()["rollout/ahead_share"] == 0.5
    other = new_loop(World([*groups[:2], remade, groups[3]]), OBJECTIVES["sampled"])
    for _ in range(2):
        other.step()
    assert weights(loop.learner) == weights(other.learner)
