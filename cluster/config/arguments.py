"""Settings from `key=value`, `config=FILE` and Python. Errors are one line with a suggestion."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import chz
from chz.blueprint import Castable
from chz.blueprint._entrypoint import EntrypointException
from chz.field import Field
from chz.tiepin import CastError, is_subtype_instance, type_repr
from chz.util import MISSING

from cluster.config.early_checks import check_path
from cluster.config.env import BUILT_IN
from cluster.config.files import CONFIG, SETTINGS_FILES, by_name, read_settings, text_of
from cluster.config.help import settings_within
from distill.errors import ConfigError
from distill.lookup import known_names
from distill.settings import (
    class_in,
    fields_of,
    is_section,
    meant_by,
    other_names,
    short_names,
    shown_fields,
)

Config = TypeVar("Config")
HELP, VERSION = "--help", "--version"
# A whole number in decimal or scientific notation: 1e3, 1_000.0.
_DECIMAL = re.compile(r"[+-]?\d+(_\d+)*(\.\d*)?(e\+?\d)?", re.IGNORECASE)
_NAMES = {
    int: "a whole number",
    float: "a number",
    tuple[float, float]: "two numbers",
    bool: "True or False",
    str: "a text",
}
# Names of settings in other libraries, by the corresponding settings here, of which the first that
# the recipe has is suggested.
_ELSEWHERE = {
    "columns.prompt": "prompt_key input_key",
    "columns.answer": "answer_key label_key",
    "clip": "clip_ratio_low clip_ratio_high epsilon_high eps_clip eps_clip_high",
    "reference_kl_coef": "kl_loss_coef kl_ctrl.kl_coef",
    "lr": "learning_rate",
    "num_substeps": "num_iterations ppo_epochs",
    "baseline": "adv_estimator",
    "scale_by_std": "scale_rewards",
    "queue.max_staleness": "max_async_level max_off_policy_steps",
    "lr_schedule": "lr_scheduler_type",
    "steps": "max_steps total_training_steps num_rollout",
    "epochs steps": "num_train_epochs total_epochs",
    "group_size": "num_generations rollouts_per_example n_samples_per_prompt rollout.n",
    "group_size samples": "num_samples",
    "eval.size": "num_prompts limit",
    "policy.server_flags": (
        "engine.server_flags tensor_parallel_size tensor_model_parallel_size tp"
    ),
    "engine": "use_vllm",
    "temperature": "rollout_temperature",
    "max_new_tokens": "max_completion_length max_response_length rollout_max_response_len",
    "prompts_per_step batch_size": "per_device_train_batch_size train_batch_size",
    "prompts_per_step": "rollout_batch_size",
    "token_budget": "gradient_accumulation_steps",
    "learner.dtype": "bf16",
    "student model": "model_name_or_path hf_checkpoint",
    "teacher": "teacher_model_name_or_path",
    "prompts data": "dataset_name prompt_data train_files",
    "eval.source": "val_files",
    "out": "output_dir default_local_dir run_name",
    "checkpoint.every": "save_steps save_interval save_freq ckpt.interval",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.keep_best": "load_best_model_at_end",
    "eval.every": "eval_steps eval_interval test_freq",
    "tracking.track": "report_to",
    "lora.rank": "lora_r",
}
_MEANT = {name: ours.split() for ours, names in _ELSEWHERE.items() for name in names.split()}


class HelpAsked(Exception):
    """Raised for --help or --version; the message is the text to print."""


def key_values(argv: Sequence[str]) -> dict[str, str]:
    """Values by key. If a key is given twice, the last value is used.

    Raises:
        ConfigError: an argument is not key=value, or is not UTF-8.
        HelpAsked: --version is among the arguments.
    """
    given, word = {}, help_asked(argv)
    for i, argument in enumerate(argv):
        _check_encoding(argument)
        if argument == VERSION:
            raise HelpAsked(f"isotherm {importlib.metadata.version('isotherm')}")
        if argument == HELP or (i and argv[i - 1] == HELP and argument == word):
            continue
        following = next((each for each in argv[i + 1 :] if each != "="), HELP)
        key, equals, value = argument.partition("=")
        name = key.strip().lstrip("-") or "key"
        loose = following != HELP and "=" not in following.removeprefix("=")
        meant = value.strip() or (following.removeprefix("=") if loose else "VALUE")
        if argument == "-h":
            raise ConfigError(f"-h is not key=value; {HELP} lists settings")
        if not equals and Path(argument).suffix in SETTINGS_FILES:
            raise ConfigError(f"{argument!r} is not key=value; write {CONFIG}={argument}")
        if not equals or key != name:
            raise ConfigError(f"{argument!r} is not key=value; write {name}={meant}")
        if not value and loose and "=" not in following:
            raise ConfigError(
                f"{argument} has no value; write {key}={meant}, without a space", field=key
            )
        given[key] = value
    return given


def help_asked(argv: Sequence[str]) -> str | None:
    """The word after --help, or "" without one; None without --help."""
    if HELP not in argv:
        return None
    word = next(iter(argv[argv.index(HELP) + 1 :]), "")
    return "" if "=" in word or word == VERSION else word


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a command: from the command line or a Python caller, and from a settings file.

    Attributes:
        given: values by name, which override the file: `Castable` texts, or a caller's values.
        file: path of the settings file; empty without one.
        tree: contents of the file.
    """

    given: Mapping[str, Any]
    file: str
    tree: Mapping[str, Any]

    @staticmethod
    def of(argv: Sequence[str]) -> Arguments:
        """Parse `argv`. Raises as `key_values` and `read_settings`."""
        return Arguments.of_values({k: Castable(text) for k, text in key_values(argv).items()})

    @staticmethod
    def of_values(given: Mapping[str, Any]) -> Arguments:
        """Arguments from values by name, including `config`. Raises as `read_settings`."""
        file = text_of(given.get(CONFIG, ""))
        rest = {name: value for name, value in given.items() if name != CONFIG}
        return Arguments(rest, file, read_settings(file) if CONFIG in given else {})

    def take(self, name: str) -> tuple[str | None, Arguments]:
        """Text of the argument `name`, which is not a setting, and the remaining arguments."""
        value = self.given.get(name, self.tree.get(name))
        given, tree = (
            {key: each for key, each in given.items() if key != name}
            for given in (self.given, self.tree)
        )
        return None if value is None else text_of(value), Arguments(given, self.file, tree)

    def settings(self, kind: type) -> dict[str, Any]:
        """All settings of the class `kind`, by name: values, and `Castable` texts.

        Raises:
            ConfigError: the file has an unknown name, or an invalid value.
        """
        try:
            in_file = by_name(kind, self.tree)
            for key, value in in_file.items():
                _checked(kind, key, value, in_file)
        except ConfigError as error:
            raise ConfigError(f"config={self.file}: {error}", field=error.field) from error
        return in_file | by_name(kind, self.given)


def built(kind: type[Config], given: Mapping[str, Any]) -> Config:
    """Build settings of the class `kind` from values and `Castable` texts by name.

    Raises:
        ConfigError: a name is unknown, a value is invalid, or a required setting is missing.
    """
    given = {key: _checked(kind, key, value, given) for key, value in given.items()}
    _check_complete(kind, given)
    try:
        return chz.Blueprint(kind).apply(given).make()
    except EntrypointException as error:  # each value is valid, but they conflict
        raise ConfigError(" ".join(str(error).split())) from error


def _check_encoding(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{argument!a} is not UTF-8; settings and the file names in them must be UTF-8"
        ) from error


def _checked(kind: type, key: str, value: Any, given: Mapping[str, Any]) -> Any:
    """Check the name and the value of a setting; returns the value in a form that chz accepts."""
    fields, parts = shown_fields(kind), key.split(".")
    for i, name in enumerate(parts):
        path, rest = ".".join(parts[: i + 1]), parts[i + 1 :]
        if name not in fields or (is_section(fields[name]) and not rest and not chz.is_chz(value)):
            raise ConfigError(
                f"{key}={text_of(value)}: no such setting; {_nearest(key, kind, given)}"
            )
        field = fields[name]
        fields = settings_within(field, given.get(path))
        if not fields and rest:
            return _checked_element(field, key, value, rest)
        if not fields:
            return _checked_value(field, key, value)
        if value is None and not rest:
            raise _misfit(field, key, value)
    return value


def _nearest(key: str, kind: type, given: Mapping[str, Any]) -> str:
    fields = fields_of(kind)
    parts = key.split(".")
    if len(parts) > 1 and (within := _within(kind, parts[0], given)):
        known = known_names(key, [f"{parts[0]}.{name}" for name in within])
        owners = [env for env in BUILT_IN if parts[0] == "env" and parts[1] in chz.chz_fields(env)]
        return f"env={owners[0].__name__} has it; {known}" if owners else known
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    elsewhere = next((_MEANT[end] for end in ends if end in _MEANT), [])
    near = [name for name in (*elsewhere, *ends[1:]) if meant_by(kind, name)][:1]
    near = _elements_near(fields, parts) or near
    near = near or [path for path in fields if path.startswith(f"{key}.")]
    near = near or get_close_matches(key, list(_names(kind, given)), n=1)
    # Search the docs of settings, for names in other libraries such as learning_rate.
    if not near and len(key) > 3:
        words = key.replace("_", " ")
        near = [name for name, field in fields.items() if words in field._doc.split(";")[0]][:1]
    return f"{f'did you mean {near[0]!r}? ' if near else ''}{HELP} all lists them"


def _elements_near(fields: Mapping[str, Field], parts: Sequence[str]) -> list[str]:
    """Settings of an element of a mapping with a similar name: teachers.a.model for teacher.a."""
    return [
        ".".join((name, *parts[1:]))
        for name in get_close_matches(parts[0], fields, n=1)
        if len(parts) == 3 and (of := class_in(fields[name])) and parts[2] in chz.chz_fields(of)
    ]


def _within(kind: type, name: str, given: Mapping[str, Any]) -> Collection[str]:
    """Names of the settings within a setting that is an object, such as `env`."""
    field = fields_of(kind).get(name)
    return settings_within(field, given.get(name)) if field else ()


def _names(kind: type, given: Mapping[str, Any]) -> Iterator[str]:
    yield from short_names(kind)
    for path, field in fields_of(kind).items():
        name = path.rpartition(".")[2]
        yield from (path, path.replace(".", "_"), *[name] * (meant_by(kind, name) == [path]))
        yield from (f"{path}.{inner}" for inner in settings_within(field, given.get(path)))


def _checked_element(field: Field, key: str, value: Any, rest: Sequence[str]) -> Any:
    """Check `NAME=value` or `NAME.setting=value` in a mapping. chz checks other objects."""
    mapping, of_objects = get_origin(field.x_type) is Mapping, class_in(field)
    plain = mapping and of_objects is None
    if _choices(field.x_type) or (plain and len(rest) > 1):
        raise ConfigError(
            f"{key}={text_of(value)}: {key.rpartition('.')[0]} has no settings of its own"
        )
    if not mapping:
        return value
    of = get_args(field.x_type)[1]
    if len(rest) == 1 and (isinstance(value, of) or (plain and isinstance(value, Castable))):
        return value
    if of_objects is None:
        raise ConfigError(f"{key}={text_of(value)} is not {_NAMES.get(of, of)}")
    if len(rest) != 2 or not rest[0]:
        path = key.removesuffix(f".{'.'.join(rest)}")
        raise ConfigError(f"{key}={text_of(value)}: write {_element_of(field, path)}")
    within = chz.chz_fields(of_objects)
    if rest[1] not in within:
        raise ConfigError(
            f"{key}={text_of(value)}: no such setting of {key.removesuffix(f'.{rest[1]}')}; "
            f"{known_names(rest[1], within)}"
        )
    return _checked_value(within[rest[1]], key, value)


def _element_of(field: Field, path: str) -> str:
    """Form of an argument that sets one value in the mapping at `path`."""
    of_objects = class_in(field)
    setting = "" if of_objects is None else f".{next(iter(chz.chz_fields(of_objects)))}"
    return f"{path}.NAME{setting}=VALUE"


def _checked_value(field: Field, key: str, value: Any) -> Any:
    choices = _choices(field.x_type)
    if get_origin(field.x_type) is Mapping:
        raise ConfigError(
            f"{key}={text_of(value)} is not a mapping; write {_element_of(field, key)}"
        )
    if kind := (field.metadata or {}).get("path"):
        check_path(key, kind, text_of(value))
    if not isinstance(value, Castable):
        value = _as_number(value, choices)
        if not _fits(field, value):
            raise _misfit(field, key, value)
        return value
    if not choices or field.meta_factory is None:
        return value
    if int in choices and float not in choices:
        value = Castable(_as_whole(value.value))
    try:
        field.meta_factory.perform_cast(value.value)
    except CastError as error:
        raise _misfit(field, key, value) from error
    return value


def _misfit(field: Field, key: str, value: Any) -> ConfigError:
    """Error for a value that does not have the type of its setting."""
    choices = _choices(field.x_type)
    if choices and not choices & _NAMES.keys():
        problem = f"{text_of(value)} is unknown; {known_names(text_of(value), choices)}"
    else:
        kinds = " or ".join(sorted(_NAMES.get(choice, str(choice)) for choice in choices))
        shown = repr(value) if isinstance(value, str) else text_of(value)
        problem = f"{shown} is not {kinds or type_repr(field.x_type)}"
    return ConfigError(f"{key}={problem}")


def _fits(field: Field, value: Any) -> bool:
    """True if a value has the type of its setting. A bool is not a number."""
    choices = _choices(field.x_type)
    if isinstance(value, bool) and choices & {int, float} and bool not in choices:
        return False
    return is_subtype_instance(value, field.x_type)


def _as_number(value: Any, choices: set[Any]) -> Any:
    """Convert a number, also of NumPy, to the setting's type; other values are unchanged."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value) if int in choices else float(value) if float in choices else value
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        whole = int in choices and float not in choices and number.is_integer()
        whole = whole and abs(number) < 2**53
        return int(number) if whole else number
    return value


def _as_whole(value: str) -> str:
    """Rewrite a whole number like 1e3 as 1000; other texts are returned unchanged."""
    if _DECIMAL.fullmatch(value.strip()) and (number := float(value)).is_integer():
        return str(int(number)) if number < 2**53 else value
    return value


def _choices(kind: Any) -> set[Any]:
    """Allowed types or literal texts of a plain value; empty for the type of an object."""
    if get_origin(kind) is Literal:
        return {str(option) for option in get_args(kind)}
    if get_origin(kind) in (Union, UnionType):
        options = [_choices(option) for option in get_args(kind) if option is not NoneType]
        return set().union(*options) if all(options) else set()
    return {kind} & _NAMES.keys()


def _check_complete(kind: type, given: Mapping[str, Any]) -> None:
    missing = []
    for name, field in shown_fields(kind).items():
        inner = settings_within(field, given.get(name))
        required = {name: field} | {f"{name}.{each}": inner[each] for each in inner}
        missing += [
            (path, each._doc)
            for path, each in required.items()
            if path not in given and each._default is each._default_factory is MISSING
        ]
    if missing:
        listed = "; ".join(
            f"{[path, *other_names(kind, path)][-1]}= ({doc})" for path, doc in missing
        )
        raise ConfigError(f"not given: {listed}", field=missing[0][0])
