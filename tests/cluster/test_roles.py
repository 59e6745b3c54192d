"""The roles of a run, their resources, and the plan that shows them."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from cluster.config.opd import OpdConfig
from cluster.config.supervised import SftConfig
from cluster.placement.layout import RolePlan, describe_layout, render
from cluster.placement.resources import ResourceDemand
from cluster.placement.roles import (
    colocated,
    cpus_at_most,
    model_paths,
    placed_roles,
    pool_bounds,
    teacher_roles,
)
from distill.errors import ConfigError
from distill.gpu import readable
from distill.settings import changed
from learner.memory import estimate_memory
from tests.refusals import refuses
from tests.tiny import TinyPair

Opd = Callable[..., OpdConfig]


def on(config: OpdConfig | SftConfig, device: str) -> list[ResourceDemand]:
    return placed_roles(changed(config, device=device))


def taken(config: OpdConfig | SftConfig, device: str) -> dict[str, tuple[int, dict[str, float]]]:
    return {role.name: (role.count, dict(role.needed)) for role in on(config, device)}


def test_each_role_has_its_resources(opd: Opd) -> None:
    config = opd(policy_engines=2, learner_workers=3, rollout_cpus=0.5, rollout_workers=4)
    assert taken(config, "cpu") == {
        "learner": (3, {"CPU": 1}), "policy": (2, {"CPU": 1}), "teacher": (1, {"CPU": 1}),
        "rollout": (4, {"CPU": 0.5}),
    }  # fmt: skip
    config = opd(gpus_per_actor=0.5, engine="embedded")
    assert taken(config, "cuda") == {
        name: (1, {"CPU": 1, "GPU": 0.5}) for name in ("learner", "policy", "teacher")
    } | {"rollout": (1, {})}


def by_turns(pair: TinyPair) -> dict[str, object]:
    """Settings of two teachers that take turns, instead of one."""
    models = {"a": pair.teacher, "b": pair.student}
    named = {f"teachers.{name}.model": model for name, model in models.items()}
    return {"teacher": None, "engine": "sglang", "teacher.gpus": "shared", **named}


def test_only_teachers_that_take_turns_share_gpus(opd: Opd, tiny_pair: TinyPair) -> None:
    settings = by_turns(tiny_pair) | {
        "teachers.c.model": "http://127.0.0.1:1", "teacher.server_flags": "--tp-size 2",
        "teacher.engines": 2, "gpus_per_actor": 0.5, "colocate": "sleep",
    }  # fmt: skip
    config = opd(**settings)
    assert colocated(config) == [("learner", "policy"), ("teacher a", "teacher b")]
    demands = {demand.name: demand for demand in on(config, "cuda")}
    for name in ("teacher a", "teacher b"):
        assert demands[name].needed == {"CPU": 1, "GPU": 0.5} and demands[name].span == 2
        assert demands[name].count == 2
    assert demands["teacher c"].needed == {} and demands["teacher c"].span == 1
    demands = {demand.name: demand for demand in on(config, "cpu")}
    assert demands["teacher a"].needed == {"CPU": 1} and demands["teacher a"].span == 1
    apart = opd(**settings | {"teacher.gpus": "own"})
    demands = {demand.name: demand for demand in on(apart, "cuda")}
    assert demands["teacher a"].needed == {"CPU": 1, "GPU": 2}


def test_policy_and_teacher_that_take_turns_share_gpus(opd: Opd) -> None:
    config = opd(
        engine="sglang", policy_engines=2, learner_workers=2, prompts_per_step=8,
        **{"teacher.gpus": "policy", "teacher.engines": 2},
    )  # fmt: skip
    assert colocated(config) == [("policy", "teacher")]
    assert taken(config, "cuda") == {
        "learner": (2, {"CPU": 1, "GPU": 1}),
        "policy": (2, {"CPU": 1, "GPU": 0.5}),
        "teacher": (2, {"CPU": 1, "GPU": 0.5}),
        "rollout": (1, {}),
    }
    with_learner = changed(config, colocate="sleep", gpus_per_actor=0.5)
    assert colocated(with_learner) == [("learner", "policy", "teacher")]
    third = (2, {"CPU": 1, "GPU": pytest.approx(1 / 3)})
    together = taken(with_learner, "cuda")
    assert together == dict.fromkeys(("learner", "policy", "teacher"), third) | {"rollout": (1, {})}
    kept = changed(with_learner, train_from="runs/kept")
    assert colocated(kept) == []
    assert taken(kept, "cuda") == {"learner": (2, {"CPU": 1, "GPU": 0.5})}


def test_tensor_parallel_engines_take_whole_gpus_and_external_servers_none(opd: Opd) -> None:
    config = opd(
        engine="sglang", policy_server_flags="--tp-size 4", teacher="http://127.0.0.1:1",
        gpus_per_actor=0.5,
    )  # fmt: skip
    roles = taken(config, "cuda")
    assert roles["policy"] == (1, {"CPU": 1, "GPU": 4}) and roles["teacher"] == (1, {})


def test_a_server_over_several_nodes_has_a_bundle_on_each(
    opd: Opd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.config.sglang_installed", lambda: True)
    monkeypatch.setattr("actors.config.require_sglang", lambda: None)
    config = opd(
        engine="sglang", policy_server_flags="--tp-size 16 --nnodes 2", policy_engines=2,
        eval_engines=1, eval_every=5, device="cuda", gpu_memory_gib=80.0,
    )  # fmt: skip
    placed = {role.name: role for role in on(config, "cuda")}
    for role, count in (("policy", 2), ("evaluation", 1)):
        assert placed[role].count == count and placed[role].nodes == 2
        assert placed[role].needed == {"CPU": 1, "GPU": 8}
    assert placed["teacher"].nodes == placed["learner"].nodes == 1
    assert cpus_at_most(config) == 1 + 1 + 2 * 2 + 2
    assert re.search(r"^needs +8 CPU, 50 GPU$", describe_layout(config), re.MULTILINE)
    embedded = opd(engine="embedded", policy_server_flags="--tp-size 2 --nnodes 2")
    with refuses(ConfigError, "server_flags"):
        on(embedded, "cpu")


def test_a_reward_model_is_one_actor(opd: Opd) -> None:
    config = opd(reward="model:DIR", reward_coef=1.0, group_size=2)
    assert taken(config, "cpu")["reward model"] == (1, {"CPU": 1})
    assert model_paths(config)["reward model"] == {"reward": "DIR"}
    assert cpus_at_most(config) == 4 and "reward model" not in pool_bounds(config)


def test_evaluation_engines_are_additional_policy_engines(opd: Opd) -> None:
    config = opd(
        eval_engines=2, eval_every=5, engine="sglang", policy_server_flags="--tp-size 4",
        policy_engines=3, device="cpu",
    )  # fmt: skip
    roles = taken(config, "cuda")
    assert roles["evaluation"] == (2, {"CPU": 1, "GPU": 4}) and roles["policy"][0] == 3
    assert model_paths(config)["evaluation"] == model_paths(config)["policy"]
    assert cpus_at_most(config) == 7 and pool_bounds(config)["evaluation"] == (2, 2)


def test_supervised_runs_have_a_learner_alone(sft: Callable[..., SftConfig]) -> None:
    config = sft(learner_workers=2)
    assert taken(config, "cpu") == {"learner": (2, {"CPU": 1})} and cpus_at_most(config) == 2
    assert model_paths(config) == {"learner": {"model": config.model.path}}


def test_pools_have_the_bounds_of_their_settings(opd: Opd, tiny_pair) -> None:
    config = opd(
        policy_engines="1..3", rollout_workers=2, teacher_engines="1..2", rollout_cpus=1,
        teacher=None,
        teachers={name: {"model": tiny_pair.teacher} for name in ("a", "b")},
    )  # fmt: skip
    assert teacher_roles(config) == {"a": "teacher a", "b": "teacher b"}
    assert pool_bounds(config) == {
        "policy": (1, 3), "rollout": (2, 2), "teacher a": (1, 2), "teacher b": (1, 2),
    }  # fmt: skip
    assert cpus_at_most(config) == 1 + 3 + 2 + 2 * 2


def test_the_plan_has_counts_memory_and_the_push(opd: Opd) -> None:
    config = opd(policy_engines="2..5", colocate="share", device="cpu")
    lines = describe_layout(config).splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert rows["policy"].split()[1] == "2..5" and "and caches" in rows["policy"]
    assert "MiB for a pass of 4096 tokens" in rows["learner"]
    assert "learner and policy" in rows["placed"]
    assert "2 policy engines" in rows["push"]
    assert re.findall(r"\d+ CPU", rows["needs"]) == ["4 CPU", "7 CPU"]


def test_the_plan_has_every_actor(opd: Opd, sft: Callable[..., SftConfig]) -> None:
    def actors(config: OpdConfig | SftConfig) -> dict[str, str]:
        rows = [re.split(r" {2,}", line) for line in describe_layout(config).splitlines()[1:]]
        return {row[0]: row[1] for row in rows if len(row) >= 5}

    trains = {"learner": "1", "policy": "1", "teacher": "1", "queue": "1"}
    workers = {"device": "cpu", "rollout_workers": "2..4"}
    assert actors(opd(**workers)) == trains | {"rollout": "2..4", "evaluator": "1"}
    placed = opd(**workers, rollout_cpus=1, eval_size=0)
    assert actors(placed) == trains | {"rollout": "2..4"}
    keeps = trains | {"rollout": "1", "group recorder": "1"}
    del keeps["learner"]
    assert actors(opd(device="cpu", rollout_only=True)) == keeps
    assert actors(sft(device="cpu")) == {"learner": "1"}


@pytest.mark.parametrize(
    ("rule", "part"),
    [
        ({}, ""),
        ({"teacher.lag": 3}, "1 teacher engine after every 3 steps"),
        ({"teacher.ema": 0.9, "teacher.engines": 2}, "2 teacher engines after each"),
    ],
    ids=str,
)
def test_the_plan_has_the_costs_of_a_moving_teacher(
    opd: Opd, rule: dict[str, Any], part: str
) -> None:
    """The live teacher has no engines; a lagged or EMA one has, and memory in the learner."""
    config = opd(teacher="policy", teacher_feedback="{prompt}!", device="cpu", **rule)
    rows = {line.split()[0]: line for line in describe_layout(config).splitlines()}
    assert ("teacher" in rows) == bool(rule)
    assert part in rows["push"] and ("teacher" in rows["push"]) == bool(rule)
    estimate = estimate_memory(config.model.path)
    assert estimate is not None
    assert readable(estimate.parameters * (20 if rule else 16)) in rows["learner"]


def test_each_role_loads_its_models(opd: Opd, tiny_pair) -> None:
    config = opd(estimator="full")
    student, teacher = {"student": tiny_pair.student}, {"teacher": tiny_pair.teacher}
    assert model_paths(config) == {
        "learner": student | teacher, "policy": student, "teacher": teacher,
    }  # fmt: skip
    config = opd(teacher="http://127.0.0.1:1")
    assert model_paths(config).keys() == {"learner", "policy"}


def test_the_plan_warns_if_this_machine_has_too_few_cores() -> None:
    demands = [
        ResourceDemand(name="policy", count=2, resources={"CPU": 1}),
        ResourceDemand(name="learner", count=1, resources={"CPU": 2}),
    ]
    roles = [RolePlan(demand=each, most=each.count, memory=None, note="") for each in demands]
    enough, few = (render(roles, cores=cores).splitlines() for cores in (4, 3))
    assert few[:-1] == enough and "3 cores" in few[-1]
