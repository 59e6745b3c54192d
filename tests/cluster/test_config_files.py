"""`config=FILE`: the same settings as on the command line, whatever they are written in."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.command import parse
from cluster.config.arguments import built
from cluster.config.files import as_yaml, by_name, read_settings
from cluster.config.learning_rate import Stage, suggested_lr
from cluster.config.on_policy import OpdConfig
from cluster.config.recipes import make
from cluster.config.supervised import DpoConfig
from cluster.evaluate import EvaluateConfig
from cluster.run_files.run_directory import RunDirectory
from cluster.train import main
from distill.envs.tool_use import ToolUse
from distill.errors import ConfigError
from distill.rules import get
from distill.settings import changed, path_of, setting_of
from tests.refusals import refuses

NewOpd = Callable[..., OpdConfig]

YAML = """\
# what we ran on Monday
recipe: opd
student: models/student
teachers:
  maths: {model: models/maths, weight: 0.5}
  code:
    model: models/code
prompts:
  - a.jsonl:3
  - b.parquet
out: runs/monday
temperature: 0.7
lr: 3e-4
wandb: off
reference: ~
compile: true
env:
  class: ToolUse
  max_turns: 3
chat_template_kwargs:
  enable_thinking: false
  style: no
checkpoint:
  every: 5
keep_last: 3
"""

TOML = """\
recipe = "opd"
student = "models/student"
prompts = ["a.jsonl:3", "b.parquet"]
out = "runs/monday"
temperature = 0.7
lr = 3e-4
wandb = "off"
compile = true
chat_template_kwargs = {enable_thinking = false, style = "no"}

[teachers.maths]
model = "models/maths"
weight = 0.5
[teachers.code]
model = "models/code"

[env]
class = "ToolUse"
max_turns = 3
[checkpoint]
every = 5
keep_last = 3
"""


def expected() -> OpdConfig:
    return parse(
        OpdConfig,
        [
            "student=models/student", "teachers.maths.model=models/maths",
            "teachers.maths.weight=0.5", "teachers.code.model=models/code",
            "prompts=a.jsonl:3,b.parquet", "out=runs/monday", "temperature=0.7", "lr=3e-4",
            "wandb=off", "compile=True", "env=ToolUse", "env.max_turns=3",
            'chat_template_kwargs={"enable_thinking": false, "style": "no"}',
            "checkpoint_every=5", "checkpoint.keep_last=3",
        ],
    )  # fmt: skip


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", YAML),
        ("run.yml", YAML.replace("\n", "\r\n")),
        ("run.yaml", "\ufeff" + YAML),
        ("run.toml", TOML),
        ("run.json", None),
    ],
)
def test_a_file_is_the_command_line(tmp_path: Path, name: str, text: str | None) -> None:
    if text is None:
        import tomllib

        text = json.dumps(tomllib.loads(TOML))
    tree = read_settings(written(tmp_path / name, text))
    assert tree.pop("recipe") == "opd"
    assert built(OpdConfig, by_name(OpdConfig, tree)) == expected()


@pytest.mark.parametrize("name", ["run.toml", "run.json"])
def test_values_of_toml_and_json_are_not_cast(tmp_path: Path, name: str) -> None:
    text = 'steps = "3"' if name.endswith("toml") else '{"steps": "3"}'
    with refuses(ConfigError, "steps"):
        parse(OpdConfig, [f"config={written(tmp_path / name, text)}"])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"steps": np.int64(5)}, 5),
        ({"steps": 5.0}, 5),
        ({"learner.lr": 1}, 1.0),
        ({"out": Path("o")}, "o"),
        ({"objective.clip": (0.2, 0.3), "loss": "ppo"}, (0.2, 0.3)),
        ({"prompts": ["a.jsonl", "b.jsonl"]}, "a.jsonl,b.jsonl"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, '{"enable_thinking": false}'),
        ({"env": {"class": "ToolUse", "max_turns": 3}}, ToolUse(max_turns=3)),
    ],
    ids=str,
)
def test_values_of_python(opd: NewOpd, given: dict[str, Any], kept: object) -> None:
    value = get(opd(**given), path_of(OpdConfig, next(iter(given))))
    assert (value, type(value)) == (kept, type(kept))


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", "5"), ("steps", True), ("learner.lr", "fast"), ("tracking.wandb", False)],
)
def test_a_value_of_another_type_is_refused(opd: NewOpd, field: str, value: object) -> None:
    with refuses(ConfigError, field):
        opd(**{field: value})


def test_the_command_line_is_above_the_file(tmp_path: Path) -> None:
    file = written(tmp_path / "run.yaml", YAML.replace("recipe: opd\n", ""))
    assert parse(OpdConfig, [f"config={file}"]) == expected()
    changed = parse(OpdConfig, ["lr=1e-6", f"config={file}", "env.max_turns=9"])
    assert (changed.learner.lr, changed.env) == (1e-6, ToolUse(max_turns=9))
    assert changed.sampling.temperature == 0.7


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"env": ToolUse(max_turns=3, tools="calculator"), "lora.rank": 4, "eval.size": 0},
        {"checkpoint_every": 3, "lr": 1e-3},
        {"teacher": None, "teachers": {"a": {"model": "m", "weight": 0.5}}},
        {"chat_template_kwargs": '{"enable_thinking": false}', "stop_tokens": "<eos>,7"},
        {"estimator": "top_k", "teacher_top_k": 4, "reference": "r", "reference_kl_coef": 0.1},
    ],
    ids=["plain", "env", "section", "teachers", "texts", "objective"],
)
def test_a_run_s_own_config_repeats_it(
    opd: NewOpd, tmp_path: Path, changes: Mapping[str, object]
) -> None:
    config = opd(**changes)
    directory = RunDirectory(config)
    directory.path.mkdir()
    directory.start(None)
    as_yaml = written(tmp_path / "given.yaml", directory.yaml)
    for named in (directory.path, directory.path / "config.json", as_yaml):
        tree = read_settings(str(named))
        assert tree.pop("recipe") == "opd"
        given = by_name(OpdConfig, tree)
        assert built(OpdConfig, given) == config
        assert built(OpdConfig, given | {"out": "elsewhere"}) == changed(config, out="elsewhere")


def test_a_file_has_of_an_environment_only_what_is_not_its_default(opd: NewOpd) -> None:
    env = yaml.safe_load(as_yaml(opd(env=ToolUse(max_turns=3, tools="calculator"))))["env"]
    assert env.pop("class").endswith("ToolUse") and env == {"max_turns": 3}


def test_a_recipe_comes_from_the_file_too(opd: NewOpd, tmp_path: Path, capsys) -> None:
    config = opd()
    directory = RunDirectory(config)
    directory.path.mkdir()
    directory.start(None)
    again = [f"config={directory.path}", f"out={tmp_path / 'again'}", "dry_run=True", "steps=3"]
    assert main(again) == 0
    assert "run 3 steps into" in " ".join(capsys.readouterr().out.split())
    assert main([*again, "recipe=dpo"]) == 2  # of other settings
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.yaml", "lr: abc", "run.yaml: learner.lr=abc is not a number or auto"),
        ("run.yaml", "studnet: a", "run.yaml: studnet=a: no such setting; did you mean 'student'?"),
        ("run.yaml", "env: {class: ToolUse, max_turn: 3}", "run.yaml: env.max_turn=3: no such"),
        ("run.yaml", "teachers: {a: {modell: m}}", "run.yaml: teachers.a.modell=m: no such"),
        ("run.yaml", "steps: [1, 2]", "run.yaml: steps=1,2 is not a whole number"),
        ("run.yaml", "steps: 1\nsteps: 2", "steps is given twice"),
        ("run.yaml", "student: [", "while parsing"),
        ("run.json", '{"steps": 1, "steps": 2}', "steps is given twice"),
        ("run.json", '{"env": {"class": "A", "class": "B"}}', "class is given twice"),
        ("run.yaml", "teachers: {maths: /dir}", r"teachers.maths=/dir"),
        ("run.yaml", "teachers: {maths: [a, b]}", r"teachers.maths=a,b"),
        ("run.yaml", "teachers: {maths: }", r"teachers.maths=None"),
        ("run.yaml", "env: {~: a}", "run.yaml holds no settings"),
        ("run.yaml", "steps: &a [*a]", "run.yaml"),
        ("run.json", '{"recipe": "opd", "run_id": "1", "settings": 5}', "holds no settings"),
        ("run.json", '{"recipe": "opd", "run_id": "1", "settings": null}', "holds no settings"),
        ("run.yaml", "a sentence", "run.yaml holds no settings; write `name: value` lines in it"),
        ("run.yaml", "- a\n- b", "run.yaml holds no settings"),
        ("run.yaml", "config: other.yaml", "run.yaml names another file; give all settings in one"),
        ("run.toml", "steps = ", "Invalid value"),
        ("run.json", "{", "Expecting"),
        ("run.yaml", "steps: 1\n\tlr: 2", "while scanning"),
        ("run.yaml", "? [a]\n: 3", "while constructing"),
        ("run.yaml", "columns: {answer: [a]}", "data.columns.answer=a is not a text"),
        ("run.yaml", "columns: [a]", "data.columns=a is no mapping"),
        ("run.yaml", "env: ~", "env=None is not"),
        ("run.yaml", 'out: "a\\0b"', "out=a\0b is no path"),
        ("run.txt", "steps: 1", "run.txt is not named .yaml, .yml, .toml, .json, nor a run's"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = written(tmp_path / name, text)
    with pytest.raises(ConfigError) as refused:
        parse(OpdConfig, [f"config={file}"])
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    missing = {tmp_path / "none.yaml": "does not exist", tmp_path: "config.json"}
    for name, message in missing.items():
        with pytest.raises(ConfigError, match=message):
            parse(OpdConfig, [f"config={name}"])


def test_other_commands_and_recipes_read_files(tmp_path: Path) -> None:
    file = written(tmp_path / "dpo.yaml", "model: m\ndata: d.jsonl\nout: o\nbeta: 0.2\n")
    assert parse(DpoConfig, [f"config={file}"]).objective.beta == 0.2
    file = written(tmp_path / "evaluate.toml", 'model = "m"\nprompts = "p"\neval_size = 9\n')
    assert parse(EvaluateConfig, [f"config={file}"]).eval.size == 9


def test_a_suggested_rate_falls_with_width_and_is_higher_for_adapters() -> None:
    stages: list[Stage] = ["sft", "opd", "rl", "dpo", "reward_model"]
    for stage in stages:
        rates = [suggested_lr(stage, width, adapter=False) for width in (512, 4096, 8192)]
        assert rates == sorted(rates, reverse=True)
        adapted = suggested_lr(stage, 4096, adapter=True)
        assert adapted == pytest.approx(10 * rates[1], rel=0.05)
        assert suggested_lr(stage, 1, adapter=True) == 1e-3
    assert [suggested_lr(stage, 4096, adapter=False) for stage in stages] == [
        2e-5, 1e-5, 1e-6, 5e-7, 1e-5,
    ]  # fmt: skip


@pytest.mark.parametrize("more", [[], ["lora.rank=4"]])
def test_the_plan_says_which_rate_auto_is(opd: NewOpd, capsys, more: list[str]) -> None:
    config = opd()
    names = ("student", "teacher", "prompts", "out", "temperature", "max_new_tokens")
    given = [
        f"{name}={get(config, setting_of(OpdConfig, path_of(OpdConfig, name), ''))}"
        for name in names
    ]
    assert main(["recipe=opd", *given, "lr=auto", "dry_run=True", *more]) == 0
    lr = suggested_lr("opd", 32, adapter=bool(more))
    trained = "an adapter" if more else "all weights"
    said = capsys.readouterr().out
    assert f"lr=auto: {lr:g}, for opd of {trained}, hidden size 32" in said
    assert f"lr {lr:g}" in " ".join(said.split())


def test_auto_needs_a_model_to_look_at() -> None:
    with pytest.raises(ConfigError, match="lr=auto is for the command line of a recipe"):
        make("dpo", model="m", data="d.jsonl", out="o", lr="auto").learner_config()


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3) | st.just("a"), inner)
    ),
    max_leaves=4,
)


_ANY: list[Any] = list(HealthCheck)


@given(st.dictionaries(st.sampled_from(["teachers", "env", "steps", "prompts", "x"]), _TREES))
@settings(max_examples=25, deadline=None, suppress_health_check=_ANY)
def test_odd_settings_are_refused_in_a_line(tmp_path: Path, tree: dict[str, Any]) -> None:
    config = written(tmp_path / "run.json", json.dumps(tree))
    with pytest.raises(ConfigError):
        parse(OpdConfig, [f"config={config}"])  # without a student, whatever else there is
