"""Declared rules of settings: each refuses its counter-examples and accepts its edges."""

from collections.abc import Iterator
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from chz.field import Field

from actors.envs.judge_env import Judged
from actors.envs.mcp_tools import McpToolUse
from cluster.config.arguments import built
from cluster.config.demos import DemoConfig
from cluster.config.env import BUILT_IN
from cluster.config.files import by_name
from cluster.config.recipes import CONFIGS, make
from cluster.evaluate import EvaluateConfig
from cluster.inspect.audit import AuditConfig
from cluster.inspect.forecast.command import ForecastConfig
from cluster.inspect.report.command import ReportConfig
from cluster.inspect.rollouts_to_sft import RolloutsToSftConfig
from cluster.sample_to_sft import SampleToSftConfig
from distill.envs.base import EnvConfig
from distill.errors import ConfigError
from distill.rules import Rule, default_of, get, rules_of
from distill.settings import fields_of
from tests.refusals import refuses

# Settings with which a recipe, an environment or a command passes every check.
_POLICY = {"student": "s", "prompts": "p", "out": "o", "sampling.temperature": 0.7}
_SUPERVISED = {"model": "m", "data": "d", "out": "o"}
GIVEN: dict[str, dict[str, Any]] = {
    "opd": _POLICY | {"teacher.model": "t"},
    "rl": _POLICY,
    "sft": _SUPERVISED,
    "dpo": _SUPERVISED,
    "reward_model": _SUPERVISED,
    **{env.__name__: {} for env in BUILT_IN},
    "Agent": {"command": "m:f"},
    "Verifiers": {"name": "n", "python": "p"},
    "Judged": {"reward_model": "m"},
    "McpToolUse": {"mcp_url": "http://h"},
    "AuditConfig": {"out": "o"},
    "DemoConfig": {"out": "o"},
    "EvaluateConfig": {"model": "m", "prompts": "p"},
    "ForecastConfig": {
        "student": "s", "teacher.model": "t", "prompts": "p", "sampling.temperature": 0.7,
    },
    "ReportConfig": {"out": "o"},
    "RolloutsToSftConfig": {"out": "o", "data": "d.jsonl"},
    "SampleToSftConfig": {"model": "m", "prompts": "p", "data": "d.jsonl", "temperature": 0.7},
}  # fmt: skip
COMMANDS = (
    AuditConfig, DemoConfig, EvaluateConfig, ForecastConfig, ReportConfig, RolloutsToSftConfig,
    SampleToSftConfig,
)  # fmt: skip
KINDS = CONFIGS | {kind.__name__: kind for kind in (*BUILT_IN, Judged, McpToolUse, *COMMANDS)}
# Further settings that a setting needs.
_REWARDS = {"objective.reward_coef": 1.0}
_TOP_K = {"objective.estimator": "top_k"}
_JUDGE = {"reward_model": None, "judge_url": "http://h", "judge_model": "m", "rubric": "r"}
WITH: dict[str, dict[str, Any]] = {
    **{name: _JUDGE for name in fields_of(Judged) if name.startswith(("judge_", "rubric"))},
    "objective.baseline": _REWARDS,
    "condense_to": {"condenser": "keywords"},
    "condenser_temperature": {"condenser": "model"},
    "condenser_tokens": {"condenser": "model"},
    "objective.clip": {"objective.loss": "ppo"},
    "objective.correct_reward_threshold": {"teacher.feedback": "{prompt}{outcome}"},
    "objective.correction_cap": {"objective.correction": "mask"},
    "objective.jsd_beta": {"objective.estimator": "full", "objective.divergence": "jsd"},
    "objective.kl_coef": {"teacher.model": "policy", "objective.hint_bonus_coef": 0.1},
    "objective.overlong_buffer": _REWARDS,
    "teacher.ema": {"teacher.model": "policy"},
    "teacher.lag": {"teacher.model": "policy"},
    "objective.teacher_top_k": _TOP_K,
    "objective.top_k_from": _TOP_K,
    "eval.engines": {"eval.every": 1},
    **{f"eval.{name}": {"eval.temperature": 1.0} for name in ("samples", "top_k", "top_p")},
    "keep_last": {"condenser": "keywords"},
    "checkpoint.keep_best": {"eval.every": 1},
    "lora.alpha": {"lora.rank": 4},
    "lora.targets": {"lora.rank": 4},
    "sampling.group_size": {"teacher.model": "t", "sampling.temperature": 0.7},
    "sft.coef": {"sft.data": "f"},
    "format_reward": {"format": "a"},
    "groups_per_step": {"steps": 1},
    "mcp_command": {"mcp_url": ""},
    "opponent_temperature": {"opponent": "reference"},
}


def declared() -> Iterator[tuple[str, str, Field]]:
    """Settings of recipes, environments and commands; shared settings come once."""
    seen = set()
    for owner in GIVEN:
        for name, field in fields_of(KINDS[owner]).items():
            rules = rules_of(field)
            if rules and (name, rules) not in seen:
                seen.add((name, rules))
                yield owner, name, field


def kinds(field: Field) -> tuple[Any, ...]:
    union = get_origin(field.x_type) in (Union, UnionType)
    return get_args(field.x_type) if union else (field.x_type,)


def fits(field: Field, value: Any) -> bool:
    """True if the value has the setting's type."""
    if isinstance(value, float):
        return float in kinds(field)
    return type(value) in kinds(field) or (type(value) is int and float in kinds(field))


def build(owner: str, settings: dict[str, Any]) -> Any:
    return make(owner, **settings) if owner in CONFIGS else made_of(KINDS[owner], settings)


def made_of(kind: type, settings: dict[str, Any]) -> Any:
    return built(kind, by_name(kind, settings))


def path(owner: str, name: str) -> str:
    return f"env.{name}" if issubclass(KINDS[owner], EnvConfig) else name


def made(owner: str, name: str, value: Any) -> Any:
    beside = WITH.get(name, {})
    known = {each: beside[each] for each in beside if each in fields_of(KINDS[owner])}
    return build(owner, GIVEN[owner] | known | {name: value})


def examples(owner: str, name: str) -> list[Any]:
    """Values of a setting, other than its default, that pass the rules about it alone."""
    field = fields_of(KINDS[owner])[name]
    options = [
        each for kind in kinds(field) if get_origin(kind) is Literal for each in get_args(kind)
    ]
    rules = [rule for rule in rules_of(field) if rule.other is None]
    edges = [value for rule in rules for value in rule.allows]
    return [
        value
        for value in (*options, True, 1, 2, 5, 1000, 0.5, "x", "a:b", 0, *edges)
        if (value in options or fits(field, value))
        and value != default_of(field)
        and all(rule.holds(None, value) for rule in rules)
    ]


def with_one(path: str, value: Any) -> SimpleNamespace:
    """Settings with a single value."""
    name, _, rest = path.partition(".")
    return SimpleNamespace(**{name: with_one(rest, value) if rest else value})


def counter_example(owner: str, name: str, rule: Rule) -> dict[str, Any]:
    """Values that break the rule, of the setting and of the one that the rule refers to."""
    assert rule.other is not None
    there = get(build(owner, GIVEN[owner]), rule.other)
    default = default_of(fields_of(KINDS[owner])[rule.other])
    for value in examples(owner, name):
        for other in (there, default, *examples(owner, rule.other)):
            if not rule.holds(with_one(rule.other, other), value):
                return {name: value, rule.other: other}
    raise AssertionError(f"nothing breaks {name}: {rule.text}")


OUTSIDE = [
    pytest.param(owner, name, value, id=f"{owner} {name}={value}")
    for owner, name, field in declared()
    for rule in rules_of(field)
    for value in rule.refuses
    if fits(field, value)
]
EDGES = [
    pytest.param(owner, name, value, id=f"{owner} {name}={value}")
    for owner, name, field in declared()
    for rule in rules_of(field)
    for value in rule.allows
    if fits(field, value)
]
RELATIONS = [
    pytest.param(owner, name, rule, id=f"{owner} {name} {rule.text}")
    for owner, name, field in declared()
    for rule in rules_of(field)
    if rule.other is not None and rule.other in fields_of(KINDS[owner])
]


@pytest.mark.parametrize(("owner", "name", "value"), OUTSIDE)
def test_a_value_outside_is_refused(owner: str, name: str, value: Any) -> None:
    with refuses(ConfigError, path(owner, name)) as refused:
        made(owner, name, value)
    assert str(refused.value).startswith(f"{path(owner, name)}=")


@pytest.mark.parametrize(("owner", "name", "value"), EDGES)
def test_a_value_at_the_edge_is_accepted(owner: str, name: str, value: Any) -> None:
    assert get(made(owner, name, value), name) == value


@pytest.mark.parametrize(("owner", "name", "rule"), RELATIONS)
def test_a_conflict_with_another_setting_is_refused(owner: str, name: str, rule: Rule) -> None:
    beside = WITH.get(rule.other or "", {})
    with refuses(ConfigError, path(owner, name)):
        build(owner, GIVEN[owner] | beside | counter_example(owner, name, rule))


@pytest.mark.parametrize("owner", ["opd", "rl", "sft", "dpo", "reward_model"])
def test_a_recipe_trains_at_least_one_step(owner: str) -> None:
    """Some recipes declare `steps` themselves, with a derived default."""
    with refuses(ConfigError, "steps"):
        build(owner, GIVEN[owner] | {"steps": 0})


def test_rules_refer_to_settings() -> None:
    known = {path for kind in KINDS.values() for path in fields_of(kind)}
    others = {rule.other for _, _, field in declared() for rule in rules_of(field)} - {None}
    assert others and others <= known
