"""The policy loop: one step per call, each group once, each version published before the return."""

import math

import pytest

from distill.errors import NonFiniteError
from distill.objective.metrics import group_metrics
from distill.objective.settings import ObjectiveConfig
from distill.objective.sums import meta_of
from distill.records import CONSTANT_REWARD
from tests.learner.conftest import NewLoop, World, untimed, weights
from tests.samples import group

OBJECTIVE = ObjectiveConfig(kl_coef=0.5, kl_discount_factor=0.9, reward_coef=1.0)


def test_the_order_of_a_step(new_loop: NewLoop) -> None:
    world = World([group(i) for i in range(4)])
    loop = new_loop(world, OBJECTIVE)
    loop.publish()
    first = weights(loop.learner)
    loop.step()
    second = weights(loop.learner)
    loop.step()
    assert world.events == ["publish 0", "take [0, 1]", "publish 1", "take [2, 3]", "publish 2"]
    assert world.published == [(0, first), (1, second), (2, weights(loop.learner))]
    assert len({tuple(sent.items()) for _, sent in world.published}) == 3


def test_engines_sleep_while_it_learns_and_the_learner_rests_while_they_load(
    new_loop: NewLoop,
) -> None:
    world = World([group(i) for i in range(4)])
    loop = new_loop(world, OBJECTIVE, sleep=lambda version: world.events.append(f"sleep {version}"))
    model = loop.learner.model
    gradients: list[bool] = []

    def look(*sent):
        gradients.append(any(p.grad is not None for p in model.parameters()))
        return world.publish(*sent)

    loop.publisher = look
    loop.publish()
    metrics = [loop.step(), loop.step()]
    assert world.events == [
        "publish 0", "take [0, 1]", "sleep 0", "publish 1", "take [2, 3]", "sleep 1", "publish 2",
    ]  # fmt: skip
    assert gradients == [False] * 3, "gradients are there while weights are pushed"
    assert all(step["time/sleep"] > 0 and step["train/grad_norm"] > 0 for step in metrics)
    awake = new_loop(World([group(i) for i in range(4)]), OBJECTIVE)
    for step in metrics:
        assert untimed(awake.step()) == {
            k: v for k, v in untimed(step).items() if k != "time/sleep"
        }


def test_a_step_s_metrics(new_loop: NewLoop) -> None:
    groups = [group(0, version=0), group(1, members=3, version=0), group(2), group(3, version=1)]
    loop = new_loop(World(groups), OBJECTIVE)
    for step in (1, 2):
        taken = groups[2 * step - 2 : 2 * step]
        metrics = loop.step()
        assert metrics["step"] == metrics["weight_version"] == loop.step_count == step
        assert (metrics["groups/first"], metrics["groups/last"]) == (2 * step - 2, 2 * step - 1)
        assert metrics["train/tokens"] == sum(made.num_actions for made in taken)
        metas = [meta_of(made) for made in taken]
        for name, value in group_metrics(metas, version=step - 1).items():
            assert metrics[name] == value, name
        parts = metrics["time/wait"] + metrics["time/learn"] + metrics["time/push"]
        assert 0 < parts <= metrics["time/step"] * (1 + 1e-9)
        assert metrics["tokens_per_s"] == metrics["train/tokens"] / metrics["time/step"]
        assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["staleness/max"] == 1 and 0 < metrics["staleness/mean"] < 1


@pytest.mark.parametrize("second", [[0, 2], [2, 1], [2, 2]])
def test_a_group_trained_twice_stops_the_run_before_the_weights(
    new_loop: NewLoop, second: list[int]
) -> None:
    world = World([group(i) for i in (0, 1, *second)])
    loop = new_loop(world, OBJECTIVE)
    loop.step()
    before = weights(loop.learner)
    with pytest.raises(AssertionError):
        loop.step()
    assert weights(loop.learner) == before and loop.step_count == 1
    assert world.events[-1] == f"take {second}"
    assert loop.save().delivery == {"watermark": 2, "set_aside": {}}


def test_dropped_groups_are_recorded(new_loop: NewLoop) -> None:
    world = World([group(i) for i in (0, 2, 4, 5)], set_aside={1: "its reward failed"})
    loop = new_loop(world, OBJECTIVE)
    metrics = loop.step()
    assert world.watermark == 3 and metrics["groups/set_aside"] == 1
    assert loop.save().delivery == {"watermark": 3, "set_aside": {"1": "its reward failed"}}
    loop.step()  # before group 3, which may still come
    assert world.watermark == 3
    assert loop.save().delivery["above"] == [4, 5]


def test_groups_that_were_replaced_are_not_faults_and_their_reward_counts(
    new_loop: NewLoop,
) -> None:
    groups = [group(i) for i in (0, 3, 4, 5)]
    world = World(groups, set_aside=dict.fromkeys((1, 2), CONSTANT_REWARD), replaced={1: 1, 2: 0})
    loop = new_loop(world, OBJECTIVE)
    metrics = loop.step()
    assert (metrics["groups/set_aside"], metrics["groups/replaced"]) == (0, 2)
    mean = metrics["reward/mean"]
    assert metrics["reward/mean_of_all"] == pytest.approx((2 * mean + 1) / 4)
    metrics = loop.step()
    assert metrics["groups/replaced"] == 0 and "reward/mean_of_all" not in metrics
    assert loop.save().delivery["watermark"] == 6


def test_waiting_time_counts(new_loop: NewLoop) -> None:
    metrics = new_loop(World([group(i) for i in range(2)]), OBJECTIVE).step(waited_s=100)
    assert 100 <= metrics["time/wait"] <= metrics["time/step"]
    assert metrics["tokens_per_s"] == metrics["train/tokens"] / metrics["time/step"]


def test_a_failed_step_counts_no_group(new_loop: NewLoop) -> None:
    world = World([group(i) for i in range(2)])
    loop = new_loop(world, OBJECTIVE)
    next(loop.learner.model.parameters()).data.fill_(math.nan)
    with pytest.raises(NonFiniteError):
        loop.step()
    assert loop.step_count == 0 and world.published == []
    assert loop.save().delivery == {"watermark": 0, "set_aside": {}}


def test_a_resumed_loop_restores_its_trained_groups(new_loop: NewLoop) -> None:
    loop = new_loop(World([group(i) for i in range(2)]), OBJECTIVE)
    loop.step()
    resumed = new_loop(World([group(i) for i in (1, 2)]), OBJECTIVE, resume_from=loop.save())
    with pytest.raises(AssertionError):
        resumed.step()
