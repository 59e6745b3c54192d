"""`config=FILE`: settings in YAML, TOML and JSON equal those of the command line."""

import json
import tomllib
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
from cluster.config.common import Stage
from cluster.config.files import as_tree, as_yaml, by_name, read_settings
from cluster.config.learning_rate import suggested_lr
from cluster.config.opd import OpdConfig
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
def test_a_file_equals_the_command_line(tmp_path: Path, name: str, text: str | None) -> None:
    if text is None:
        text = json.dumps(tomllib.loads(TOML))
    tree = read_settings(written(tmp_path / name, text))
    assert tree.pop("recipe") == "opd"
    assert built(OpdConfig, by_name(OpdConfig, tree)) == expected()


@pytest.mark.parametrize("name", ["run.toml", "run.json"])
def test_texts_in_toml_and_json_are_no_numbers(tmp_path: Path, name: str) -> None:
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
def test_python_values_are_converted(opd: NewOpd, given: dict[str, Any], kept: object) -> None:
    value = get(opd(**given), path_of(OpdConfig, next(iter(given))))
    assert (value, type(value)) == (kept, type(kept))


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", "5"), ("steps", True), ("learner.lr", "fast"), ("tracking.wandb", False)],
)
def test_a_value_of_another_type_is_refused(opd: NewOpd, field: str, value: object) -> None:
    with refuses(ConfigError, field):
        opd(**{field: value})


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
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
def test_the_config_of_a_run_repeats_it(
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


def test_a_written_file_leaves_out_defaults_of_the_environment(opd: NewOpd) -> None:
    env = yaml.safe_load(as_yaml(opd(env=ToolUse(max_turns=3, tools="calculator"))))["env"]
    assert env.pop("class").endswith("ToolUse") and env == {"max_turns": 3}


def test_rl_has_no_teachers_to_write_or_to_set() -> None:
    common = {"student": "s", "prompts": "p.jsonl", "out": "o", "temperature": 1.0}
    assert not {"teacher", "teachers"} & as_tree(make("rl", **common)).keys()
    for name in ("teacher", "teacher.engines", "teachers.a.model"):
        with refuses(ConfigError, name):
            make("rl", **common, **{name: "2"})


def test_a_file_may_name_the_recipe(opd: NewOpd, tmp_path: Path, capsys) -> None:
    config = opd()
    directory = RunDirectory(config)
    directory.path.mkdir()
    directory.start(None)
    again = [f"config={directory.path}", f"out={tmp_path / 'again'}", "dry_run=True", "steps=3"]
    assert main(again) == 0
    assert "run 3 steps" in " ".join(capsys.readouterr().out.split())
    assert main([*again, "recipe=dpo"]) == 2


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("run.yaml", "lr: abc", "learner.lr=abc"),
        ("run.yaml", "studnet: a", "'student'"),
        ("run.yaml", "env: {class: ToolUse, max_turn: 3}", "env.max_turn=3"),
        ("run.yaml", "teachers: {a: {modell: m}}", "teachers.a.modell=m"),
        ("run.yaml", "steps: [1, 2]", "steps=1,2"),
        ("run.yaml", "steps: 1\nsteps: 2", "steps"),
        ("run.json", '{"steps": 1, "steps": 2}', "steps"),
        ("run.json", '{"env": {"class": "A", "class": "B"}}', "class"),
        ("run.yaml", "teachers: {maths: /dir}", "teachers.maths=/dir"),
        ("run.yaml", "teachers: {maths: [a, b]}", "teachers.maths=a,b"),
        ("run.yaml", "teachers: {maths: }", "teachers.maths=None"),
        ("run.yaml", "env: {~: a}", "run.yaml"),
        ("run.yaml", "steps: &a [*a]", "run.yaml"),
        ("run.json", '{"recipe": "opd", "run_id": "1", "settings": 5}', "run.json"),
        ("run.yaml", "a sentence", "run.yaml"),
        ("run.yaml", "config: other.yaml", "run.yaml"),
        ("run.toml", "steps = ", "run.toml"),
        ("run.json", "{", "run.json"),
        ("run.yaml", "? [a]\n: 3", "run.yaml"),
        ("run.yaml", "columns: {answer: [a]}", "data.columns.answer=a"),
        ("run.yaml", "columns: [a]", "data.columns=a"),
        ("run.yaml", "env: ~", "env=None"),
        ("run.yaml", 'out: "a\\0b"', "out=a\0b"),
        ("run.txt", "steps: 1", "run.txt"),
        ("run.yaml", None, "run.yaml"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, text: str | None, names: str) -> None:
    file = str(tmp_path / name) if text is None else written(tmp_path / name, text)
    with pytest.raises(ConfigError) as refused:
        parse(OpdConfig, [f"config={file}"])
    assert names in str(refused.value) and "\n" not in str(refused.value)


def test_all_commands_and_recipes_read_files(tmp_path: Path) -> None:
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
def test_the_plan_names_the_rate_of_lr_auto(opd: NewOpd, capsys, more: list[str]) -> None:
    config = opd()
    names = ("student", "teacher", "prompts", "out", "temperature", "max_new_tokens")
    given = [
        f"{name}={get(config, setting_of(OpdConfig, path_of(OpdConfig, name), ''))}"
        for name in names
    ]
    assert main(["recipe=opd", *given, "lr=auto", "dry_run=True", *more]) == 0
    lr = suggested_lr("opd", 32, adapter=bool(more))
    shown = " ".join(capsys.readouterr().out.split())
    assert f"lr=auto: {lr:g}" in shown and f"lr {lr:g}" in shown


def test_lr_auto_must_be_resolved_before_the_learner_is_made() -> None:
    with refuses(ConfigError, "learner.lr"):
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
def test_arbitrary_files_raise_no_other_error(tmp_path: Path, tree: dict[str, Any]) -> None:
    config = written(tmp_path / "run.json", json.dumps(tree))
    with pytest.raises(ConfigError):
        parse(OpdConfig, [f"config={config}"])  # there is no student
