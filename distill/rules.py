"""Declaration of a setting together with the rules that its value must meet.

    keep_last: int = setting(at_least(1), default=2, doc="number of newest checkpoints")
    engines: int = setting(at_least(0), needs("eval.every"), default=0, doc="engines for ...")

A rule refuses a value with a ConfigError that names the setting, the value and the reason. Rules
refer to other settings by their path in a run's settings (`checkpoint.every`), in an environment by
name. They are checked whenever an object with the setting is created. If the object lacks a setting
that a rule refers to, an object that has both checks the rule: for a section, the run's settings. A
condition that none of the constructors below can express is a `chz.validate` method.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any, Final

import chz
from chz.field import Field

from distill.errors import ConfigError, first_line
from distill.json_values import is_number
from distill.lookup import known_names

_RULES = "rules"
# Number of characters of a refused value in a message.
_SHOWN = 120
# Value of a setting that an object does not have.
ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Rule:
    """Condition on the value of a setting; None always meets it.

    Attributes:
        text: the condition, for help texts: "at least 1".
        holds: whether `(settings, value)` meets it.
        problem: text of the problem and the remedy, which follows `name=value`.
        other: name of the other setting that the condition depends on, if any.
        allows: values that just meet the condition.
        refuses: values that just fail the condition.
        only_given: if True, a setting with its default value meets the condition.
    """

    text: str
    holds: Callable[[Any, Any], bool]
    problem: Callable[[Any, Any], str]
    other: str | None = None
    allows: tuple[Any, ...] = ()
    refuses: tuple[Any, ...] = ()
    only_given: bool = False


def setting(*rules: Rule, metadata: Mapping[str, Any] | None = None, **field: Any) -> Any:
    """A `chz.field` with rules. Keyword arguments are those of `chz.field`."""
    return chz.field(
        metadata={**(metadata or {}), _RULES: rules},
        validator=[partial(_check, rule) for rule in rules],
        **field,
    )


def rules_of(field: Field) -> tuple[Rule, ...]:
    """Rules of a field that `setting` declared; empty for other fields."""
    return (field.metadata or {}).get(_RULES, ())


def default_of(field: Field) -> Any:
    """Default value of a field; MISSING without one."""
    factory = field._default_factory
    return factory() if callable(factory) else field._default


def get(settings: Any, path: str) -> Any:
    """Value of a setting by its path; `ABSENT` if the object lacks it.

    Args:
        settings: a run's settings, or one of their sections, whose paths begin with its `within`.
    """
    for name in path.removeprefix(getattr(settings, "within", "")).split("."):
        settings = getattr(settings, name, ABSENT)
    return settings


@chz.chz
class WithSections:
    """Settings with sections. Checks the sections' rules about settings of other sections."""

    @chz.validate
    def _settings_of_sections_agree(self) -> None:
        for name in chz.chz_fields(self):
            part = getattr(self, name)
            if getattr(part, "within", None) != f"{name}.":
                continue
            for inner, field in chz.chz_fields(part).items():
                for rule in rules_of(field):
                    if rule.other is not None and get(part, rule.other) is ABSENT:
                        _require(rule, self, f"{name}.{inner}", getattr(part, inner), field)


def _path(settings: Any, name: str) -> str:
    """Path of a setting; for a setting of an environment it begins with `env.`."""
    within = getattr(settings, "within", "")
    return name if name.startswith(within) else within + name


def _check(rule: Rule, settings: Any, attribute: str) -> None:
    """Check a rule of a field of `settings`; chz calls this as a validator."""
    name = attribute.removeprefix("X_")
    field = chz.chz_fields(settings)[name]
    _require(rule, settings, _path(settings, name), getattr(settings, attribute), field)


def _require(rule: Rule, settings: Any, path: str, value: Any, field: Field) -> None:
    """Raise ConfigError if the value of the setting at `path` breaks a rule.

    A rule about a setting that `settings` lacks is not checked.
    """
    if value is None or (rule.other is not None and get(settings, rule.other) is ABSENT):
        return
    if rule.only_given and value == default_of(field):
        return
    if not rule.holds(settings, value):
        text = str(value)
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise ConfigError(f"{path}={shown} {rule.problem(settings, value)}", value=value)


def at_least(bound: float | str, why: str = "") -> Rule:
    """The value is `bound`, a number or another setting, or larger. Infinity is refused."""
    return _bound(operator.ge, "at least", bound, why, step=-1)


def above(bound: float | str, why: str = "") -> Rule:
    """The value is larger than `bound`, a number or another setting. Infinity is refused."""
    return _bound(operator.gt, "above", bound, why, step=0)


def at_most(bound: float | str, why: str = "") -> Rule:
    """The value is `bound`, a number or another setting, or smaller."""
    return _bound(operator.le, "at most", bound, why, step=1)


def below(bound: float | str, why: str = "") -> Rule:
    """The value is smaller than `bound`, a number or another setting."""
    return _bound(operator.lt, "below", bound, why, step=0)


def _bound(
    compare: Callable[[Any, Any], bool], how: str, bound: float | str, why: str, step: int
) -> Rule:
    """Rule of a comparison. `bound + step` is the nearest whole number that is refused."""
    reason = f": {why}" if why else ""
    if isinstance(bound, str):
        return Rule(
            f"{how} {bound}",
            lambda settings, value: compare(value, get(settings, bound)),
            lambda settings, _: f"must be {how} {_shown(settings, bound)}{reason}",
            other=bound,
        )
    return Rule(
        f"{how} {bound}",
        lambda _, value: compare(value, bound) and is_number(value),
        lambda _, __: f"must be {how} {bound}{reason}",
        allows=(bound,) if step else (),
        refuses=(bound + step, math.nan, math.inf, -math.inf),
    )


# The value is a number of objects that are in memory together, such as samples of a prompt.
IN_MEMORY: Final = at_most(1_000_000, "each takes memory of its own")


def one_of(*choices: str, or_own: bool = False) -> Rule:
    """The value is one of the names, or with `or_own` a custom `package.module:function`."""
    return Rule(
        "|".join([*choices, *["module:function"] * or_own]),
        lambda _, value: value in choices or (or_own and ":" in value),
        lambda _, value: f"is unknown; {known_names(value, choices)}",
        allows=choices,
        refuses=(f"no_{choices[0]}",),
    )


# The value is the path of a file of rows.
JSONL: Final = Rule(
    "ends in .jsonl",
    lambda _, value: PurePath(value).suffix == ".jsonl",
    lambda _, __: "must end in .jsonl: one JSON object per line",
    allows=("a.jsonl",),
    refuses=("a.no", ".jsonl", ""),
)


def readable_as(what: str, read: Callable[[str], object], *, allows: str, refuses: str) -> Rule:
    """The value is a text that `read` accepts: a regular expression, a date, JSON."""

    def fault(value: str) -> str:
        try:
            read(value)
        except (ValueError, re.error, RecursionError, OverflowError) as error:
            return first_line(error)
        return ""

    return Rule(
        what,
        lambda _, value: not fault(value),
        lambda _, value: f"is not a valid {what}: {fault(value)}",
        allows=(allows,),
        refuses=(refuses,),
    )


def not_blank(remedy: str) -> Rule:
    """The value is a text with more than white space in it."""
    return Rule(
        "not blank",
        lambda _, value: bool(value.strip()),
        lambda _, __: f"is blank; {remedy}",
        allows=("a",),
        refuses=("", " "),
    )


def multiple_of(other: str, why: str) -> Rule:
    """The value is a multiple of another setting."""
    return Rule(
        f"a multiple of {other}",
        lambda settings, value: value % get(settings, other) == 0,
        lambda settings, _: f"must be a multiple of {_shown(settings, other)}: {why}",
        other=other,
    )


def never(value: Any, why: str) -> Rule:
    """The value is not `value`; the message is `why`."""
    return Rule(
        f"not {value}", lambda _, given: given != value, lambda _, __: why, refuses=(value,)
    )


def needs(other: str, *values: Any, remedy: str = "leave it out") -> Rule:
    """The setting has an effect only if `other` has one of `values`, by default any but 0."""
    options = _options(values)

    def holds(settings: Any, _: Any) -> bool:
        found = get(settings, other)
        return found in values if values else bool(found)

    return Rule(
        f"needs {other}{options}",
        holds,
        lambda settings, _: (
            f"changes nothing without {_path(settings, other)}; {remedy}"
            if get(settings, other) is None
            else f"changes nothing with {_shown(settings, other)}: it needs "
            f"{_path(settings, other)}{options}; {remedy}"
        ),
        other=other,
        only_given=True,
    )


def not_with(other: str, *values: Any, why: str, remedy: str = "leave one of them out") -> Rule:
    """The setting cannot be given if `other` has one of `values`, by default any value.

    None and False do not count as values.
    """

    def holds(settings: Any, _: Any) -> bool:
        found = get(settings, other)
        return found not in values if values else found is None or found is False

    return Rule(
        f"not with {other}{_options(values)}",
        holds,
        lambda settings, _: f"with {_shown(settings, other)}: {why}; {remedy}",
        other=other,
        only_given=True,
    )


def only_for(value: Any, rule: Rule) -> Rule:
    """A rule about other settings that applies only if the setting has this value."""
    return replace(
        rule,
        text=f"{value}: {rule.text}",
        holds=lambda settings, given: given != value or rule.holds(settings, given),
    )


def _options(values: tuple[Any, ...]) -> str:
    return f"={' or '.join(map(str, values))}" if values else ""


def _shown(settings: Any, name: str) -> str:
    return f"{_path(settings, name)}={get(settings, name)}"
