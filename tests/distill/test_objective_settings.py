"""Combinations of settings that an objective refuses, and those that it accepts."""

from typing import Any

import pytest

from distill.errors import ConfigError
from distill.objective.settings import DEFAULT_TOP_K, ObjectiveConfig, OpdObjective, RlObjective
from tests.refusals import refuses

NAN = float("nan")

# What the declarations of single settings do not tell (tests/cluster/test_rules.py has those), by
# the setting that the error names.
REFUSED_OF_POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("clip", {"loss": "ppo", "clip": -0.1}),
    ("clip", {"loss": "ppo", "clip": (0.1, NAN)}),
    ("clip", {"loss": "a:b", "clip": 0.1}),  # of no use to the loss
    ("baseline", {"reward_coef": 1.0, "baseline": "mine"}),
]
REFUSED_OF_TEACHERS: list[tuple[str, dict[str, Any]]] = [
    ("kl_discount_factor", {"estimator": "full", "kl_discount_factor": 0.5}),
    (
        "kl_discount_factor",
        {"estimator": "top_k", "kl_discount_factor": 0.5, "reference_kl_coef": 0.1},
    ),
    ("kl_discount_factor", {"kl_coef": 0.0, "kl_discount_factor": 0.5}),
    ("kl_discount_factor", {"estimator": "auto", "divergence": "jsd", "kl_discount_factor": 0.5}),
]


@pytest.mark.parametrize(("field", "settings"), REFUSED_OF_POLICIES, ids=str)
def test_combinations_refused_with_any_reward(field: str, settings: dict[str, Any]) -> None:
    for config in (ObjectiveConfig, OpdObjective, RlObjective):
        with refuses(ConfigError, f"objective.{field}"):
            config(**settings)


@pytest.mark.parametrize(("field", "settings"), REFUSED_OF_TEACHERS, ids=str)
def test_refused_of_a_teacher(field: str, settings: dict[str, Any]) -> None:
    with refuses(ConfigError, f"objective.{field}"):
        ObjectiveConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "of_policy", "of_teacher"),
    [
        ({"estimator": "sampled"}, 0, 0),
        ({"estimator": "full"}, 0, 0),
        ({"estimator": "top_k"}, DEFAULT_TOP_K, 0),
        ({"estimator": "top_k", "teacher_top_k": 5}, 5, 0),
        ({"estimator": "top_k", "divergence": "forward_kl"}, 0, DEFAULT_TOP_K),
        ({"estimator": "top_k", "divergence": "jsd"}, DEFAULT_TOP_K, DEFAULT_TOP_K),
        ({"estimator": "top_k", "teacher_top_k": 5, "top_k_from": "teacher"}, 0, 5),
        ({"estimator": "top_k", "teacher_top_k": 5, "top_k_from": "union"}, 5, 5),
    ],
)
def test_whose_likeliest_tokens_are_asked_for(
    settings: dict[str, Any], of_policy: int, of_teacher: int
) -> None:
    made = ObjectiveConfig(**settings)
    assert (made.asked_of_policy, made.asked_of_teacher) == (of_policy, of_teacher)


def test_a_distillation_needs_its_teacher() -> None:
    with refuses(ConfigError, "objective.kl_coef"):
        OpdObjective(kl_coef=0.0, reward_coef=1.0)
    with refuses(ConfigError, "objective.divergence"):
        OpdObjective(kl_coef=0.0, hint_bonus_coef=1.0, divergence="jsd")


WHOLE: list[dict[str, Any]] = [
    {"estimator": "full"}, {"estimator": "full", "divergence": "jsd"},
    {"estimator": "full", "entropy_coef": 0.01}, {"estimator": "top_k", "divergence": "forward_kl"},
]  # fmt: skip
SAMPLED: list[dict[str, Any]] = [
    {"estimator": "auto"}, {"estimator": "sampled"}, {"estimator": "top_k"},
    {"estimator": "full", "reward_coef": 1.0}, {"estimator": "full", "hint_bonus_coef": 0.1},
    {"estimator": "top_k", "divergence": "jsd", "reference_kl_coef": 0.1},
]  # fmt: skip
WEIGHING: list[dict[str, Any]] = [
    {"loss": "ppo"}, {"loss": "ppo", "clip": 0.1}, {"loss": "cispo"},
    {"loss": "gspo", "clip": (3e-4, 0.1)}, {"correction": "mask"},
    {"correction": "truncate", "correction_cap": 3.0},
]  # fmt: skip


@pytest.mark.parametrize("weighing", WEIGHING, ids=str)
def test_a_loss_without_any_weight_is_refused(weighing: dict[str, Any]) -> None:
    [name, *_] = weighing
    for settings in WHOLE:
        assert not ObjectiveConfig(**settings).has_advantages
        made = OpdObjective(**settings, **weighing)
        with refuses(ConfigError, f"objective.{name}"):
            made.check_weighing(bonuses=False)
        made.check_weighing(bonuses=True)
    for settings in SAMPLED:
        OpdObjective(**settings, **weighing).check_weighing(bonuses=False)


@pytest.mark.parametrize("settings", [*WHOLE, *SAMPLED], ids=str)
@pytest.mark.parametrize("loss", ["importance_sampling", "dro", "package.module:own"])
def test_a_loss_with_terms_of_its_own_goes_with_any_estimator(
    loss: str, settings: dict[str, Any]
) -> None:
    OpdObjective(**settings, loss=loss).check_weighing(bonuses=False)


def test_rewards_need_a_weight_and_somebody_to_compare_with() -> None:
    RlObjective().check_comparison(prompts=1, group_size=2)
    RlObjective(reward_coef=0.0).check_comparison(prompts=1, group_size=1)
    alone = RlObjective(reward_coef=0.5)
    with refuses(ConfigError, "sampling.group_size"):
        alone.check_comparison(prompts=1, group_size=1)
