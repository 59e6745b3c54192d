"""Batches of a step of the policy loop: parts of its groups, and other rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from distill.objective.rows import RowMeta, policy_rows
from distill.objective.settings import Correction, ObjectiveConfig
from distill.types import TrajectoryGroup
from learner.loop import PolicyLoop, SupervisedMix
from learner.plan import Part
from learner.supervised import RowStream
from tests.learner.conftest import (
    NewLoop,
    Watched,
    World,
    naive_logprobs,
    own_advantages,
    trained,
    trainer_state,
    weights,
)
from tests.samples import demonstration, group

OBJECTIVE = ObjectiveConfig(kl_coef=0.5, reward_coef=1.0)
GROUPS = [group(i, members=2 + i % 2) for i in range(10)]


def sources(parts: Sequence[Part]) -> list[list[str]]:
    return [
        [
            f"group {row.place.group_id}" if isinstance(row, RowMeta) else row.source
            for row in part.rows_D
        ]
        for part in parts
    ]


def rows_of(*group_ids: int) -> list[str]:
    return [f"group {i}" for i in group_ids for _ in GROUPS[i].trajectories_G]


def with_rewards(made: TrajectoryGroup, *rewards: float) -> TrajectoryGroup:
    members = zip(made.trajectories_G, rewards, strict=True)
    return replace(made, trajectories_G=[replace(member, reward=r) for member, r in members])


# Several updates


@pytest.mark.parametrize(
    ("num_substeps", "groups_per_step", "cut"),
    [
        (1, 3, [[0, 1, 2]]),
        (2, 4, [[0, 1], [2, 3]]),
        (2, 5, [[0, 1, 2], [3, 4]]),
        (3, 3, [[0], [1], [2]]),
        (3, 2, [[0], [1]]),  # no more updates than groups
    ],
)
def test_updates_train_on_groups_in_turn(
    new_loop: NewLoop,
    monkeypatch: pytest.MonkeyPatch,
    num_substeps: int,
    groups_per_step: int,
    cut: list[list[int]],
) -> None:
    objective = ObjectiveConfig(reward_coef=1.0, num_substeps=num_substeps)
    world = World(GROUPS, per_step=groups_per_step)
    loop = new_loop(world, objective)
    watched = Watched(loop.learner, monkeypatch)
    metrics = loop.step()
    skipped = ["skip_update"] * (num_substeps - len(cut))
    assert (
        watched.calls == ["step"] * len(cut) + skipped
    )  # no ratio asks for the learner's own log-probs
    assert [sources(parts) for parts in watched.updates] == [[rows_of(*ids)] for ids in cut]
    assert metrics["train/updates"] == len(cut)
    assert metrics["train/groups"] == groups_per_step
    assert metrics["train/tokens"] == sum(g.num_actions for g in GROUPS[:groups_per_step])
    assert (loop.step_count, len(world.published)) == (1, 1)  # versions count steps, not updates


def test_advantages_are_those_of_the_whole_step(
    new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the centre of the reference penalty does not depend on the parts."""
    objective = ObjectiveConfig(reference_kl_coef=1.0, num_substeps=2)
    groups = [
        group(i, reference_logprobs_T=np.full(5, -1.0 - i, np.float32), members=1) for i in range(2)
    ]
    loop = new_loop(World(groups), objective)
    watched = Watched(loop.learner, monkeypatch)
    loop.step()
    made = [row for rows in watched.rows for row in rows]
    expected = policy_rows(groups, objective)
    for row, other in zip(made, expected, strict=True):
        assert row.advantages_T.tolist() == other.advantages_T.tolist()


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_ratios_are_against_the_log_probs_before_the_first_update(
    new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch, correction: Correction
) -> None:
    """cispo with both bounds at 1 counts every token whose ratio is not exactly 1 as clipped."""
    objective = ObjectiveConfig(loss="cispo", clip=0, correction=correction, num_substeps=2)
    loop = new_loop(World(GROUPS, per_step=4), objective)
    before = loop.learner.logprobs(policy_rows(GROUPS[:4], objective))
    watched = Watched(loop.learner, monkeypatch)
    metrics = loop.step()
    assert watched.calls == ["logprobs", "step", "step"]
    rows = [row for rows in watched.rows for row in rows]
    for row, logprobs_N in zip(rows, before, strict=True):
        assert row.proximal_logprobs_T is not None
        assert row.proximal_logprobs_T[row.loss_mask_T].tolist() == logprobs_N.tolist()
        assert not row.proximal_logprobs_T[~row.loss_mask_T].any()
    assert metrics["train/clip_share"] > 0.3  # of the second update: the weights have moved


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_with_a_correction_and_one_update_the_ratio_is_exactly_one(
    new_loop: NewLoop,
    monkeypatch: pytest.MonkeyPatch,
    plain_model: PreTrainedModel,
    correction: Correction,
) -> None:
    settings: dict[str, Any] = {"loss": "cispo", "clip": 0}
    uncorrected = new_loop(World(GROUPS), ObjectiveConfig(**settings))
    assert uncorrected.step()["train/clip_share"] == 1
    objective = ObjectiveConfig(correction=correction, **settings)
    loop = new_loop(World(GROUPS), objective)
    watched = Watched(loop.learner, monkeypatch)
    metrics = loop.step()
    assert watched.calls == ["step"] and metrics["train/clip_share"] == 0

    rows = policy_rows(GROUPS[:2], objective)
    with torch.no_grad():
        logprobs_N = torch.cat([naive_logprobs(plain_model, row) for row in rows]).double().numpy()
    weight_N = np.exp(logprobs_N - trained(rows, "behaviour_logprobs_T"))
    outside_N = weight_N > 2 if correction == "truncate" else (weight_N > 2) | (weight_N < 0.5)
    weight_N = np.where(outside_N, 2 if correction == "truncate" else 0, weight_N)
    assert 0 < outside_N.mean() < 1
    assert metrics["train/correction_share"] == pytest.approx(outside_N.mean())
    expected = -(weight_N * own_advantages(rows, logprobs_N) * logprobs_N).mean()
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-4)


# Groups without a signal


FILTERED = ObjectiveConfig(kl_coef=0, reward_coef=1.0, constant_groups="drop", num_substeps=2)


def test_groups_of_one_reward_are_left_out(
    new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [with_rewards(GROUPS[0], 1, 1), GROUPS[1], with_rewards(GROUPS[2], 0, 0)]
    loop = new_loop(World(groups, per_step=3), FILTERED)
    watched = Watched(loop.learner, monkeypatch)
    metrics = loop.step()
    assert [sources(parts) for parts in watched.updates] == [[rows_of(1)]]
    assert watched.calls == ["step", "skip_update"]
    assert (metrics["train/groups"], metrics["train/tokens"]) == (1, groups[1].num_actions)
    assert metrics["reward/constant_groups"] == pytest.approx(2 / 3)  # of all that were sampled
    assert loop.save().delivery == {"watermark": 3, "set_aside": {}}


def test_a_step_without_groups_continues_the_run(new_loop: NewLoop) -> None:
    """No update: momentum stays, the schedule continues, and the version is published."""
    dull = [with_rewards(GROUPS[i], *[1.0] * len(GROUPS[i].trajectories_G)) for i in (0, 1, 4, 5)]
    bright = [*GROUPS[2:4], *dull[:2], *GROUPS[4:6]]
    world = World([replace(made, group_id=i) for i, made in enumerate(bright)])
    loop = new_loop(world, FILTERED)
    loop.step()  # gives AdamW its momentum
    before, state = weights(loop.learner), trainer_state(loop.learner)
    metrics = loop.step()
    assert weights(loop.learner) == before
    after = trainer_state(loop.learner)
    assert after["moments"] == state["moments"]
    updates = [each["schedule"]["last_epoch"] for each in (state, after)]
    assert updates == [2, 4] and metrics["train/updates"] == 0
    assert world.published[-1] == (2, before) and metrics["weight_version"] == 2
    for name in ("train/groups", "train/tokens", "train/updates", "tokens_per_s"):
        assert metrics[name] == 0, name
    assert loop.save().delivery == {"watermark": 4, "set_aside": {}}
    assert loop.step()["train/groups"] == 2 and weights(loop.learner) != before


# Supervised rows beside


def mix(coef: float = 0.5) -> SupervisedMix:
    rows = [demonstration(2, 1 + i, seed=60 + i) for i in range(6)]
    return SupervisedMix(stream=RowStream(rows, batch_size=2, seed=3), coef=coef)


def test_a_batch_of_other_rows_is_in_every_update(
    new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = ObjectiveConfig(reward_coef=1.0, num_substeps=2)
    loop = new_loop(World(GROUPS), objective, supervised=mix())
    watched = Watched(loop.learner, monkeypatch)
    made = [loop.step() for _ in range(2)]
    stream = mix().stream
    expected = [[rows_of(i), [row.source for row in stream.batch(i)]] for i in range(4)]
    assert [sources(parts) for parts in watched.updates] == expected
    batch_tokens = [sum(row.num_trained for row in stream.batch(i)) for i in range(4)]
    assert made[0]["train/tokens"] == sum(g.num_actions for g in GROUPS[:2]) + sum(batch_tokens[:2])
    assert "train/nll" not in made[0]  # the policy's metrics keep their names


def test_metrics_of_the_other_rows(new_loop: NewLoop, plain_model: PreTrainedModel) -> None:
    alone = new_loop(World(GROUPS), OBJECTIVE).step()
    beside = new_loop(World(GROUPS), OBJECTIVE, supervised=mix(0.25)).step()
    with torch.no_grad():
        logprobs_N = torch.cat([naive_logprobs(plain_model, row) for row in mix().stream.batch(0)])
    nll = -logprobs_N.mean().item()
    assert beside["sft/nll"] == pytest.approx(nll, rel=1e-4)
    assert beside["train/loss"] == pytest.approx(alone["train/loss"] + 0.25 * nll, rel=1e-4)
    for name in ("train/ratio", "train/entropy", "train/ess", "advantage/mean"):
        assert beside[name] == pytest.approx(alone[name]), name


def test_a_resumed_loop_takes_the_next_batches(
    new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = ObjectiveConfig(reward_coef=1.0, num_substeps=2)

    def new(first_group: int, **settings: Any) -> PolicyLoop:
        return new_loop(World(GROUPS[first_group:]), objective, supervised=mix(), **settings)

    straight = new(0)
    for _ in range(4):
        straight.step()
    loop = new(0)
    for _ in range(2):
        loop.step()
    resumed = new(4, resume_from=loop.save())
    watched = Watched(resumed.learner, monkeypatch)
    for _ in range(2):
        resumed.step()
    stream = mix().stream
    assert [sources(parts)[1] for parts in watched.updates] == [
        [row.source for row in stream.batch(i)] for i in range(4, 8)
    ]
    assert weights(resumed.learner) == weights(straight.learner)


def test_other_rows_are_trained_without_groups(new_loop: NewLoop) -> None:
    dull = [with_rewards(group(i), 1, 1) for i in range(2)]
    loop = new_loop(World(dull), FILTERED, supervised=mix())
    before = weights(loop.learner)
    metrics = loop.step()
    assert metrics["train/groups"] == 0 and metrics["train/updates"] == FILTERED.num_substeps
    rows = [row for i in range(2) for row in mix().stream.batch(i)]
    assert metrics["train/tokens"] == sum(row.num_trained for row in rows)
    assert "sft/nll" in metrics and weights(loop.learner) != before
