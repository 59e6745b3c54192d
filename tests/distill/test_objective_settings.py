"""Settings of objectives: sections, names, rules and changes, and refused combinations."""

from typing import Any, ClassVar

import chz
import pytest

from distill.errors import ConfigError
from distill.objective.settings import DEFAULT_TOP_K, ObjectiveConfig, OpdObjective, RlObjective
from distill.rules import WithSections, at_least, needs, setting
from distill.settings import by_path, changed, fields_of, meant_by, path_of, section_field
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
def test_whose_top_is_asked_for(settings: dict[str, Any], of_policy: int, of_teacher: int) -> None:
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
def test_a_loss_with_own_terms_goes_with_any_estimator(loss: str, settings: dict[str, Any]) -> None:
    OpdObjective(**settings, loss=loss).check_weighing(bonuses=False)


def test_rewards_need_a_weight_and_somebody_to_compare_with() -> None:
    RlObjective().check_comparison(prompts=1, group_size=2)
    RlObjective(reward_coef=0.0).check_comparison(prompts=1, group_size=1)
    alone = RlObjective(reward_coef=0.5)
    with refuses(ConfigError, "sampling.group_size"):
        alone.check_comparison(prompts=1, group_size=1)


@chz.chz
class Inks:
    """Inks of a press."""

    within: ClassVar[str] = "inks."

    every: int = setting(at_least(1), default=2, doc="sheets between two fillings")
    colour: str | None = setting(needs("paper.gloss"), default=None, doc="colour beside black")
    amount: float = setting(at_least("every"), default=5.0, doc="millilitres")


@chz.chz
class Paper:
    """Paper of a press."""

    within: ClassVar[str] = "paper."

    every: int = setting(at_least(1), default=3, doc="sheets between two checks")
    gloss: bool = setting(default=False, doc="glossy paper")


@chz.chz
class Box:
    """Object of a setting that is no section."""

    gloss: int = chz.field(default=1)


@chz.chz
class Press(WithSections):
    """A press."""

    out: str = chz.field(doc="where the sheets go")
    inks: Inks = section_field(Inks)
    paper: Paper = section_field(Paper)
    box: Box = chz.field(default_factory=Box, doc="box")
    width: int = setting(at_least("paper.every"), default=9, doc="width")


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("inks.every", ["inks.every"]),
        ("inks_every", ["inks.every"]),
        ("every", ["inks.every", "paper.every"]),
        ("colour", ["inks.colour"]),
        ("gloss", ["paper.gloss"]),
        ("box.gloss", ["box.gloss"]),
        ("inks", ["inks"]),
        ("out", ["out"]),
        ("inks.gloss", []),
        ("color", []),
    ],
)
def test_a_name_means_a_path(name: str, paths: list[str]) -> None:
    assert meant_by(Press, name) == paths


def test_the_error_of_an_ambiguous_name_lists_its_meanings() -> None:
    with refuses(ConfigError, "every", names="inks.every or paper.every"):
        path_of(Press, "every")


def test_fields_have_their_paths() -> None:
    assert [*fields_of(Press)] == [
        "out", "inks.every", "inks.colour", "inks.amount", "paper.every", "paper.gloss", "box",
        "width",
    ]  # fmt: skip


def press(**settings: Any) -> Press:
    return chz.Blueprint(Press).apply({"out": "o"} | by_path(settings)).make()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"inks": {"every": 0}}, "inks.every"),
        ({"inks": {"amount": 1.0}}, "inks.amount"),
        ({"inks": {"colour": "red"}}, "inks.colour"),
        ({"width": 5, "paper": {"every": 6}}, "width"),
    ],
)
def test_rules_within_a_section_and_between_sections(settings: dict[str, Any], field: str) -> None:
    with refuses(ConfigError, field):
        press(**settings)


def test_a_section_alone_leaves_rules_about_others_to_the_whole() -> None:
    assert Inks(colour="red").colour == "red"
    assert press(inks={"colour": "red"}, paper={"gloss": True}).inks == Inks(colour="red")
    with refuses(ConfigError, "inks.amount"):
        Inks(amount=1.0)


def test_changes_reach_into_sections() -> None:
    first = press(inks={"every": 4})
    assert changed(first, inks_every=5) == changed(first, inks={"every": 5})
    assert changed(first, gloss=True, colour="red").inks == Inks(every=4, colour="red")
    assert changed(first, inks=Inks(every=1)).inks.every == 1
    with refuses(ConfigError, "inks.colour"):
        changed(first, colour="red")
